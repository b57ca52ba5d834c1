"""Several servers of one pair behind one address: started, watched, replaced, and chosen by what they have read."""
