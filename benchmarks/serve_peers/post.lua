-- For wrk: sends the file BODY with the headers of HEADERS ("Name: value" lines), and prints what it found as one line of JSON.
local file = assert(io.open(os.getenv("BODY"), "rb"))
wrk.method = "POST"
wrk.body = file:read("*a")
file:close()
for name, value in os.getenv("HEADERS"):gmatch("([^:\n]+): ([^\n]+)") do
  wrk.headers[name] = value
end

function done(summary, latency, requests)
  local e = summary.errors
  local errors = e.connect + e.read + e.write + e.status + e.timeout
  io.write(string.format(
    'RESULT {"requests": %d, "seconds": %.6f, "errors": %d, "p50_ms": %.4f, "p99_ms": %.4f}\n',
    summary.requests, summary.duration / 1e6, errors, latency:percentile(50) / 1e3, latency:percentile(99) / 1e3))
end
