"""The drafter: a process of its own that drafts for one or several verifiers."""
