from semspec.cli.__main__ import run

if __name__ == "__main__":
    run()
