"""`python -m mtp_tools.triton_server REPOSITORY`."""

from mtp_tools.triton_server.cli import main

if __name__ == "__main__":
    main()
