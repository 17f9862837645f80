// SPDX-License-Identifier: Apache-2.0

// Perftest has ucx_perftest stand beside: bare UCX between two processes, one message of
// a size again and again, as many under way as a batch has pieces. It is a yardstick, no peer:
// it knows no lists of places, and its one buffer stays in the caches. See package peers.
package main

import (
	"context"
	"fmt"
	"os"
	"time"

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
type end struct{ test bench.PerfTest }

// lanes are transports and devices.
var lanes = map[string][2]string{"host": {"posix,sysv,cma,self", ""}, "tcp": {"tcp", "lo"}}

// runTime is about how long one run lasts.
const runTime = 100 * time.Millisecond

// Open implements peers.End.
func (e *end) Open(r *peers.Request) (peers.Answer, error) {
	lane, ok := lanes[r.Lane]
	if !ok {
		return peers.Answer{}, fmt.Errorf("no lane %q: %w", r.Lane, peers.ErrUnsupported)
	}
	e.test = bench.PerfTest{Transports: lane[0], Devices: lane[1], Time: runTime}
	return peers.Answer{Version: bench.PerfName + " of the system", Settings: "bare UCX over " + lane[0] +
		", one buffer in the caches, both ends spin"}, nil
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
	test := "ucp_put_bw"
	if op == "read" {
		test = "ucp_get"
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
