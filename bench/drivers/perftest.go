// SPDX-License-Identifier: Apache-2.0

package drivers

import (
	"context"
	"errors"
	"fmt"
	"math"
	"os/exec"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/sluicehq/sluice/backends/rdma"
	"github.com/sluicehq/sluice/bench"
)

// perftestEnd has ucx_perftest stand beside, or ib_write_bw and ib_read_bw on lane rdma: bare UCX
// or verbs between two processes, one message of a size again and again, as many under way as a
// batch has pieces. They know no lists of places, and their one buffer stays in the caches. The
// initiator's end runs both processes; that of the target does nothing.
type perftestEnd struct {
	base
	perfTool
}

// perfTool is such a program, which runs as a server and as a client.
type perfTool struct {
	fix    string            // how to get it
	tests  map[string]string // by operation
	env    []string          // NAME=VALUE, beside the environment
	header string            // what the line of column names begins with

	program func(test string) string
	// options for so many messages of a size, so many at a time
	client, server func(test string, size uint64, window, n int) []string
}

// ucxLanes are transports and devices of UCX.
var ucxLanes = map[bench.Lane][2]string{bench.Host: {"posix,sysv,cma,self", "all"},
	bench.TCP: {"tcp", "lo"}}

// Open implements bench.End.
func (e *perftestEnd) Open(r *bench.Request) (a bench.Answer, err error) {
	if r.Lane == string(bench.RDMA) {
		at, err := verbsPort()
		e.perfTool = verbsTool(at)
		return bench.Answer{Version: "perftest of the system", Settings: at.device +
			" to itself, one queue pair, one buffer, both ends spin"}, err
	}
	lane, ok := ucxLanes[bench.Lane(r.Lane)]
	if !ok {
		return a, fmt.Errorf("no lane %q: %w", r.Lane, bench.ErrUnsupported)
	}
	e.perfTool = ucxTool(lane[0], lane[1])
	return bench.Answer{Version: "ucx_perftest of the system", Settings: "bare UCX over " +
		lane[0] + ", one buffer in the caches, both ends spin"}, nil
}

func ucxTool(transports, devices string) perfTool {
	return perfTool{fix: "apt-get install ucx-utils",
		tests:   map[string]string{bench.OpWrite: "ucp_put_bw", bench.OpRead: "ucp_get"},
		env:     []string{"UCX_TLS=" + transports, "UCX_NET_DEVICES=" + devices},
		header:  "iterations",
		program: func(string) string { return "ucx_perftest" },
		client: func(test string, size uint64, window, n int) []string {
			return []string{"-t", test, "-s", fmt.Sprint(size), "-n", fmt.Sprint(n), "-w",
				fmt.Sprint(max(n/10, 1)), "-O", fmt.Sprint(window), "-f", "-v"}
		},
		// the client tells it
		server: func(string, uint64, int, int) []string { return nil }}
}

// port is a port of a device for verbs.
type port struct {
	device   string
	number   int
	gidIndex int
}

// verbsTool has both ends on one port. -F: a clock rate that changes is no error, since the result
// is none of the clock's.
func verbsTool(at port) perfTool {
	options := func(_ string, size uint64, window, n int) []string {
		return []string{"-F", "-d", at.device, "-i", fmt.Sprint(at.number), "-x",
			fmt.Sprint(at.gidIndex), "-s", fmt.Sprint(size), "-n", fmt.Sprint(n), "-t",
			fmt.Sprint(window)}
	}
	return perfTool{fix: "apt-get install perftest", header: "#bytes",
		tests:   map[string]string{bench.OpWrite: "ib_write_bw", bench.OpRead: "ib_read_bw"},
		program: func(test string) string { return test }, client: options, server: options}
}

// verbsPort is the port that backend rdma would take first.
func verbsPort() (port, error) {
	found, err := rdma.Examine(rdma.Config{})
	if err != nil {
		return port{}, fmt.Errorf("%w: %w", err, bench.ErrUnsupported)
	}
	for _, device := range found.Devices {
		for _, p := range device.Ports {
			if p.Chosen {
				return portOf(p), nil
			}
		}
	}
	return port{}, fmt.Errorf("no port is active: sluice doctor says what to do: %w",
		bench.ErrUnsupported)
}

func portOf(p rdma.PortFinding) port {
	device, number, _ := strings.Cut(p.Name, ":")
	at := port{device: device, number: 1}
	if n, err := strconv.Atoi(number); err == nil {
		at.number = n
	}
	for _, gid := range p.GIDs {
		if gid.Chosen {
			at.gidIndex = gid.Index
		}
	}
	return at
}

// The bounds of a run. The first has as many messages as perfProbe bytes, in any case enough to
// have a rate, and few enough where two ends that spin share a core: there a message takes a slice
// of the scheduler.
const (
	perfTime    = 100 * time.Millisecond
	perfProbe   = 4 << 20
	perfLeast   = 16
	perfFirst   = 200
	perfForward = 100 // how far a run foretells a longer one
	perfMost    = 100e6
	perfTries   = 3 // of a result that is none: where the clock is emulated, perftest has such
)

// Prepare implements bench.End. The first run of a shape finds out how many messages take perfTime.
func (e *perftestEnd) Prepare(op string, size uint64, local, _ []int32) (bench.Posting, error) {
	test, ok := e.tests[op]
	if !ok {
		return nil, errDurable
	}
	n, enough := min(max(perfProbe/int(min(size, perfProbe)), perfLeast), perfFirst), false
	measure := func(ctx context.Context) (message time.Duration, err error) {
		for range perfTries {
			message, err = e.run(ctx, test, size, len(local), n)
			if !errors.Is(err, bench.ErrNonsense) {
				break
			}
		}
		return message, err
	}
	return measuring(func(ctx context.Context) (time.Duration, error) {
		for !enough {
			message, err := measure(ctx)
			if err != nil {
				return 0, err
			}
			want := int(min(max(float64(perfTime)/float64(max(message, 1)), perfLeast), perfMost))
			enough, n = want <= n*perfForward, min(want, n*perfForward)
		}
		message, err := measure(ctx)
		return message * time.Duration(len(local)), err
	}), nil
}

// run measures n messages, and returns what one takes.
func (p *perfTool) run(ctx context.Context, test string, size uint64, window, n int) (time.Duration,
	error) {
	path, err := exec.LookPath(p.program(test))
	if err != nil {
		return 0, fmt.Errorf("%w: %s: %w", err, p.fix, bench.ErrUnsupported)
	}
	ctx, cancel := context.WithTimeoutCause(ctx, perfLimit,
		fmt.Errorf("%s has not ended within %v", test, perfLimit))
	defer cancel()
	server, number, err := serveTool(ctx, p.env, path, p.server(test, size, window, n))
	if err != nil {
		return 0, err
	}
	defer server.stop()
	client, err := startTool(ctx, p.env, path, append([]string{"127.0.0.1", "-p",
		fmt.Sprint(number)}, p.client(test, size, window, n)...))
	if err != nil {
		return 0, err
	}
	defer client.stop()
	if err := client.last(server); err != nil {
		return 0, fmt.Errorf("%s: %w", test, err)
	}
	gbps, err := parsePerf(client.out.Bytes(), p.header, size)
	return time.Duration(float64(size) / gbps), err
}

// parsePerf finds the last line of values behind a line of column names, as ucx_perftest has them
// with commas between, and perftest with blanks, and returns GB/s. Their MB are 2^20 bytes.
func parsePerf(out []byte, header string, size uint64) (gbps float64, err error) {
	var names []string
	for line := range strings.Lines(string(out)) {
		fields := strings.FieldsFunc(line, func(r rune) bool {
			return strings.ContainsRune(", \t\r\n", r)
		})
		fields = slices.DeleteFunc(fields, func(s string) bool { return s == "BW" })
		if len(fields) > 1 && fields[0] == header {
			names = fields
			continue
		}
		if names == nil || len(fields) != len(names) {
			continue
		}
		column := func(list ...string) float64 {
			for _, name := range list {
				if i := slices.Index(names, name); i >= 0 {
					v, err := strconv.ParseFloat(fields[i], 64)
					if err == nil && v > 0 && !math.IsInf(v, 0) {
						return v
					}
				}
			}
			return 0
		}
		rate := max(column("overall_mr"), column("MsgRate[Mpps]")*1e6)
		if mb := column("overall_bw", "average[MB/sec]"); mb >= 1 {
			gbps = mb * (1 << 20) / 1e9
		} else if mb > 0 && rate > 0 { // two decimals are too few
			gbps = rate * float64(size) / 1e9
		}
	}
	if gbps == 0 {
		return 0, fmt.Errorf("no line of results, but %q: %w", complaint(out), bench.ErrNonsense)
	}
	return gbps, nil
}
