"""Targets with recurrent layers: states that verify draft trees and discard rejected drafts."""
