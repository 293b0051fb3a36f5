"""Models by reference: what a user may write after ``model:``, and the packaged models that can be fetched."""
