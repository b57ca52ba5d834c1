from semspec.cli import run

run()
