"""What is shown of a finished run, of its tasks and of this machine. Imported only by loop.py and cli.py."""
