"""This process and its children: time limits, patience, fault points, what is made once."""
