from semspec.cli.main import run

run()
