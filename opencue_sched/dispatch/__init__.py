"""One cluster pass: gather, plan, book, commit, launch, settle."""
