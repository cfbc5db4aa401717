-- A script for wrk: requests the paths that follow `--` by turns, and ends with one line of JSON.

local requests, turn = {}, 0

function init(args)
	for index = 1, #args do
		requests[index] = wrk.format("GET", args[index])
	end
end

function request()
	turn = turn % #requests + 1
	return requests[turn]
end

function done(summary, latency)
	local errors = summary.errors
	io.write(string.format(
		'{"requests": %d, "duration_us": %d, "bytes": %d, '
			.. '"failed": {"connect": %d, "read": %d, "write": %d, "status": %d, "timeout": %d}, '
			.. '"latency": {"mean_us": %.0f, "sd_us": %.0f, "max_us": %d, "p50_us": %d, "p90_us": %d, "p99_us": %d}}\n',
		summary.requests, summary.duration, summary.bytes,
		errors.connect, errors.read, errors.write, errors.status, errors.timeout,
		latency.mean, latency.stdev, latency.max,
		latency:percentile(50), latency:percentile(90), latency:percentile(99)
	))
end
