"""One cluster pass: follow, plan, book, commit, launch, settle."""
