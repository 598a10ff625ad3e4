"""What a drafter is: one public module here is one kind; `heads.api` and `heads.nn` support
them."""
