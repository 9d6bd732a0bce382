"""The processes of a job: starting, meeting and watching them."""
