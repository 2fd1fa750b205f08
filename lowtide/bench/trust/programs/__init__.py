"""Small programs as people write them: each file has a make() that returns step, model, optimizer and batch."""
