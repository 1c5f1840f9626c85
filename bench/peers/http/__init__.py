"""`make bench-peers-http`: servers beside each other, under one load over HTTP.

Each contender is one server process on a loopback address that speaks OpenAI's completions API.
`contenders` says who they are and how each is started, `serving` keeps a process, `drive` puts
`tokenpath bench load` on it and judges the answers, `page` is the result and `compare` the command.
"""
