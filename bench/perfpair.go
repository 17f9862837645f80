// SPDX-License-Identifier: Apache-2.0

package bench

import (
	"context"
	"errors"
	"fmt"
	"net"
	"time"
)

// perfTool is a benchmark of others that runs as a server and a client, as long as it
// takes for a number of messages.
type perfTool interface {
	find(r *PerfRun) (path string, err error)
	environment() []string             // beside ours
	server(r *PerfRun, n int) []string // options, without the port
	client(r *PerfRun, n int) []string // the same
	parse(out []byte, r *PerfRun) (PerfFigure, error)
	complaint(out []byte) string // the line that says why it failed
}

// perfPair runs one on this host. The server listens on all addresses while it waits for
// its client, some milliseconds. Not for several goroutines at once.
type perfPair struct {
	tool   perfTool
	time   time.Duration   // of one measurement, about
	counts map[PerfRun]int // messages that take it
}

// PerfRun is a test of such a benchmark.
type PerfRun struct {
	// "ucp_put_bw", "ucp_get", "ucp_am_lat", "ucp_put_lat"; "ib_write_bw", "ib_read_bw",
	// "ib_write_lat"
	Test   string
	Size   uint64
	Window int // messages under way at once
}

// PerfFigure is what one run has measured.
type PerfFigure struct {
	Iterations int
	GBps       float64       // 1e9 bytes a second; of a latency test those of one direction
	P50        time.Duration // of one message: of a latency test one way, else between two posts
	Average    time.Duration // of one message
}

// The bounds of a run. Calibration begins with perfProbe bytes, in any case enough
// messages to have a rate, and few enough where two ends that spin share a core: there a
// message takes a slice of the scheduler.
const (
	perfProbe    = 4 << 20
	perfProbeMin = 16
	perfProbeMax = 200
	perfProbeUp  = 100 // how far a short run foretells a longer one
	perfCountMax = 100e6
	perfTries    = 3                // further ones of a run that is too slow
	perfStart    = 10 * time.Second // until the server listens, and for all but the time
)

// perfLast is how long a client may outlive its server, which ends when the last message has come.
// Tests have less.
var perfLast = 10 * time.Second

// errPerfSlow ends a run.
var errPerfSlow = errors.New("the benchmark has not ended in time")

// measure runs a test once, the first time after a short run that finds out how many
// messages take the time.
func (p *perfPair) measure(ctx context.Context, r PerfRun) (PerfFigure, error) {
	if r.Size < 1 || r.Window < 1 {
		return PerfFigure{}, fmt.Errorf("%s of %d bytes, %d at once: want at least 1: %w", r.Test,
			r.Size, r.Window, ErrShape)
	}
	path, err := p.tool.find(&r)
	if err != nil {
		return PerfFigure{}, err
	}
	if p.counts == nil {
		p.counts = map[PerfRun]int{}
	}
	if p.counts[r] == 0 {
		if p.counts[r], err = p.calibrate(ctx, path, r); err != nil {
			return PerfFigure{}, err
		}
	}
	f, err := p.run(ctx, path, r, p.counts[r])
	for tries := 0; errors.Is(err, errPerfSlow) && tries < perfTries; tries++ {
		// the machine is not what it was when that was calibrated
		if p.counts[r], err = p.calibrate(ctx, path, r); err == nil {
			f, err = p.run(ctx, path, r, p.counts[r])
		}
	}
	return f, err
}

// calibrate finds out how many messages take the time.
func (p *perfPair) calibrate(ctx context.Context, path string, r PerfRun) (int, error) {
	first := min(max(perfProbe/int(min(r.Size, perfProbe)), perfProbeMin), perfProbeMax)
	for n := first; ; {
		f, err := p.run(ctx, path, r, n)
		if errors.Is(err, errPerfSlow) && n > first {
			return n / perfProbeUp, nil // the machine has become slower meanwhile
		}
		if err != nil {
			return 0, err
		}
		want := int(min(max(float64(p.time)/float64(max(f.Average, 1)), perfProbeMin),
			perfCountMax))
		if want <= n*perfProbeUp {
			return want, nil
		}
		n *= perfProbeUp
	}
}

// run measures n messages.
func (p *perfPair) run(ctx context.Context, path string, r PerfRun, n int) (PerfFigure, error) {
	limit := perfStart + 5*p.time
	ctx, cancel := context.WithTimeoutCause(ctx, limit, fmt.Errorf("%w: %v", errPerfSlow, limit))
	defer cancel()
	server, port, err := p.serve(ctx, path, &r, n)
	if err != nil {
		return PerfFigure{}, err
	}
	defer server.stop()
	args := append([]string{"127.0.0.1", "-p", port}, p.tool.client(&r, n)...)
	client, err := startPerf(ctx, p.tool.environment(), path, args...)
	if err != nil {
		return PerfFigure{}, err
	}
	defer client.stop()
	select {
	case <-client.ended:
	case <-server.ended: // then the client ends, too, or never will
		select {
		case <-client.ended:
		case <-time.After(perfLast):
			return PerfFigure{}, fmt.Errorf("%s: %w: %s", r.Test, errPerfEarly,
				p.tool.complaint(server.out.Bytes()))
		}
	}
	if ctx.Err() != nil {
		return PerfFigure{}, context.Cause(ctx)
	}
	if client.err != nil {
		return PerfFigure{}, fmt.Errorf("%s: %w: %s", r.Test, client.err,
			p.tool.complaint(client.out.Bytes()))
	}
	return p.tool.parse(client.out.Bytes(), &r)
}

// serve starts the server on a free port. Another program may take the port in between:
// then on another one.
func (p *perfPair) serve(ctx context.Context, path string, r *PerfRun, n int) (*perfProcess, string,
	error) {
	var err error
	for range 3 {
		var port int
		if port, err = freePort(); err != nil {
			return nil, "", err
		}
		args := append([]string{"-p", fmt.Sprint(port)}, p.tool.server(r, n)...)
		var server *perfProcess
		if server, err = startPerf(ctx, p.tool.environment(), path, args...); err != nil {
			return nil, "", err
		}
		if err = server.listening(ctx, port); err == nil {
			return server, fmt.Sprint(port), nil
		}
		server.stop()
		if ctx.Err() != nil {
			return nil, "", context.Cause(ctx)
		}
		err = fmt.Errorf("%s: %w: %s", r.Test, err, p.tool.complaint(server.out.Bytes()))
	}
	return nil, "", err
}

func freePort() (int, error) {
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		return 0, fmt.Errorf("find a free port for a benchmark: %w", err)
	}
	defer l.Close()
	return l.Addr().(*net.TCPAddr).Port, nil
}
