// SPDX-License-Identifier: Apache-2.0

package bench

import (
	"context"
	"os/exec"
	"strconv"
	"time"

	"github.com/sluicehq/sluice/driver"
)

// PerfTest runs ucx_perftest, UCX's own benchmark, as a server and a client on this
// host. What it measures: a message that lies always at one place, from memory that UCX
// allocated (UCP_MEM_MAP_ALLOCATE, which peers of this host map) to memory of that kind in the
// server, or back (ucp_get). Both ends are one thread that never sleeps, but for the server
// of ucp_get over shared memory; endpoints have no error handling. Not for several
// goroutines at once.
//
// The server listens on all addresses while it waits for its client, some milliseconds.
type PerfTest struct {
	Path string // "": ucx_perftest, as the shell finds it
	// UCX_TLS and UCX_NET_DEVICES; "": as the environment has them
	Transports, Devices string
	Time                time.Duration // of one measurement, about; 0: 1 s

	pair perfPair
}

// Measure runs a test once, the first time after a short run that finds out how many
// messages take Time. Without a ucx_perftest the error is a *driver.UnavailableError.
func (p *PerfTest) Measure(ctx context.Context, r PerfRun) (PerfFigure, error) {
	p.pair.tool, p.pair.time = p, orSecond(p.Time)
	return p.pair.measure(ctx, r)
}

func orSecond(d time.Duration) time.Duration {
	if d <= 0 {
		return time.Second
	}
	return d
}

func (p *PerfTest) find(*PerfRun) (string, error) {
	name := p.Path
	if name == "" {
		name = PerfName
	}
	path, err := exec.LookPath(name)
	if err != nil {
		return "", &driver.UnavailableError{Backend: PerfName, Reason: err.Error(),
			Fix: "apt-get install ucx-utils"}
	}
	return path, nil
}

func (p *PerfTest) environment() []string {
	var env []string
	for name, value := range map[string]string{"UCX_TLS": p.Transports,
		"UCX_NET_DEVICES": p.Devices} {
		if value != "" {
			env = append(env, name+"="+value)
		}
	}
	return env
}

// server has no options: the client tells it.
func (p *PerfTest) server(*PerfRun, int) []string { return nil }

func (p *PerfTest) client(r *PerfRun, n int) []string {
	return []string{"-t", r.Test, "-s", strconv.FormatUint(r.Size, 10), "-n", strconv.Itoa(n), "-w",
		strconv.Itoa(max(n/10, 1)),
		"-O", strconv.Itoa(r.Window), "-f", "-v"}
}

func (p *PerfTest) parse(out []byte, r *PerfRun) (PerfFigure, error) {
	return parsePerf(out, r.Size)
}

func (p *PerfTest) complaint(out []byte) string { return perfComplaint(out) }
