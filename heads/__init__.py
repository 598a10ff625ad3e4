"""What a drafter is: a public module here is one kind; `heads.api` and `heads.nn` support them."""
