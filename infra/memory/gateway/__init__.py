"""A store, with nodes' memory before it, as WebHDFS: stock Spark and Hadoop read and write it with no jar of ours."""
