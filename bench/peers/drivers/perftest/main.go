// SPDX-License-Identifier: Apache-2.0

// Perftest has ucx_perftest stand beside, or ib_write_bw and ib_read_bw on lane rdma: bare UCX or
// verbs between two processes, one message of a size again and again, as many under way as a
// batch has pieces. They are yardsticks, no peers: they know no lists of places, and their one
// buffer stays in the caches. See package peers.
package main

import (
	"context"
	"fmt"
	"os"
	"strconv"
	"strings"
	"time"

	"github.com/sluicehq/sluice/backends/rdma"
	"github.com/sluicehq/sluice/bench"
	"github.com/sluicehq/sluice/bench/peers"
)

func main() {
	if err := peers.Serve(&end{}); err != nil {
		fmt.Fprintln(os.Stderr, "drivers/perftest:", err)
		os.Exit(1)
	}
}

// end of the initiator runs both processes itself; that of the target does nothing.
type end struct {
	test        tester
	write, read string
}

// tester is one of those programs.
type tester interface {
	Measure(ctx context.Context, r bench.PerfRun) (bench.PerfFigure, error)
}

// lanes are transports and devices of UCX.
var lanes = map[string][2]string{"host": {"posix,sysv,cma,self", ""}, "tcp": {"tcp", "lo"}}

// runTime is about how long one run lasts.
const runTime = 100 * time.Millisecond

// Open implements peers.End.
func (e *end) Open(r *peers.Request) (peers.Answer, error) {
	if r.Lane == string(peers.RDMA) {
		return e.openVerbs()
	}
	lane, ok := lanes[r.Lane]
	if !ok {
		return peers.Answer{}, fmt.Errorf("no lane %q: %w", r.Lane, peers.ErrUnsupported)
	}
	e.write, e.read = "ucp_put_bw", "ucp_get"
	e.test = &bench.PerfTest{Transports: lane[0], Devices: lane[1], Time: runTime}
	return peers.Answer{Version: bench.PerfName + " of the system", Settings: "bare UCX over " +
		lane[0] +
		", one buffer in the caches, both ends spin"}, nil
}

// openVerbs takes the port that backend rdma would take first, at both ends.
func (e *end) openVerbs() (peers.Answer, error) {
	found, err := rdma.Examine(rdma.Config{})
	if err != nil {
		return peers.Answer{}, fmt.Errorf("%w: %w", err, peers.ErrUnsupported)
	}
	for _, device := range found.Devices {
		for _, port := range device.Ports {
			if port.Chosen {
				e.write, e.read = "ib_write_bw", "ib_read_bw"
				at := verbsPort(port)
				e.test = &bench.VerbsTest{Client: at, Server: at, Time: runTime}
				return peers.Answer{Version: bench.VerbsName + " of the system",
						Settings: port.Name + " to itself, one queue pair, one buffer, " +
							"both ends spin"},
					nil
			}
		}
	}
	return peers.Answer{}, fmt.Errorf("no port is active: sluice doctor says what to do: %w",
		peers.ErrUnsupported)
}

// verbsPort is a port as perftest spells it.
func verbsPort(port rdma.PortFinding) bench.VerbsPort {
	device, number, _ := strings.Cut(port.Name, ":")
	at := bench.VerbsPort{Device: device, Port: 1}
	if n, err := strconv.Atoi(number); err == nil {
		at.Port = n
	}
	for _, gid := range port.GIDs {
		if gid.Chosen {
			at.GID = gid.Index
		}
	}
	return at
}

// Memory implements peers.End.
func (e *end) Memory() []byte { return nil }

// Connect implements peers.End.
func (e *end) Connect(string) error { return nil }

// posting is a run.
type posting struct {
	end *end
	run bench.PerfRun
}

// Prepare implements peers.End.
func (e *end) Prepare(op string, size uint64, local, _ []int32) (peers.Posting, error) {
	test := e.write
	if op == "read" {
		test = e.read
	}
	return &posting{e, bench.PerfRun{Test: test, Size: size, Window: len(local)}}, nil
}

// Measure implements peers.Measurer: what one run says of a batch.
func (p *posting) Measure(ctx context.Context) (time.Duration, error) {
	f, err := p.end.test.Measure(ctx, p.run)
	if err != nil {
		return 0, err
	}
	return time.Duration(float64(p.run.Size) * float64(p.run.Window) / f.GBps), nil
}

// Post implements peers.Posting.
func (p *posting) Post(ctx context.Context) error {
	_, err := p.Measure(ctx)
	return err
}

// Close implements peers.Posting.
func (p *posting) Close() error { return nil }

// Regions implements peers.End.
func (e *end) Regions(int, uint64) (peers.Answer, error) {
	return peers.Answer{}, fmt.Errorf("it measures no registration: %w", peers.ErrUnsupported)
}

// Notify implements peers.End.
func (e *end) Notify([]byte) error {
	return fmt.Errorf("it measures messages by tests of its own: %w", peers.ErrUnsupported)
}

// Receive implements peers.End.
func (e *end) Receive() (bool, error) { return false, e.Notify(nil) }
