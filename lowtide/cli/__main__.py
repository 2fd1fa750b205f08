"""`python -m lowtide.cli`."""

from lowtide.cli import main

main()
