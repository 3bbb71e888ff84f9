-- One fixed request for wrk, and its summary as one line that is easy to read back.
-- Called as: wrk … URL -- REQUEST-TARGET HOST
-- Only wrk.path and wrk.headers are set: a `request` function would run Lua for every request and slow wrk down.

function init(args)
   wrk.path = args[1]
   wrk.headers["Host"] = args[2]
end

function done(summary, latency, requests)
   local e = summary.errors
   io.write(string.format(
      'SUMMARY {"requests": %d, "bytes": %d, "microseconds": %d, "p99": %d, ' ..
      '"connect": %d, "read": %d, "write": %d, "status": %d, "timeout": %d}\n',
      summary.requests, summary.bytes, summary.duration, latency:percentile(99.0),
      e.connect, e.read, e.write, e.status, e.timeout))
end
