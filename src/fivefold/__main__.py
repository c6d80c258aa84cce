from fivefold.cli import main

main()
