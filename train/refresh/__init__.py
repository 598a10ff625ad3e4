"""Refreshing a drafter: where its training starts (`start`), and what a refresh did (`record`)."""
