"""Models of other people's libraries: each trained for a few steps within a budget, beside eager."""
