// SPDX-License-Identifier: Apache-2.0

package ucx_test

import (
	"context"
	"fmt"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/sluicehq/sluice/backends/ucx"
	"github.com/sluicehq/sluice/driver"
	"github.com/sluicehq/sluice/driver/drivertest"
	"github.com/sluicehq/sluice/engine"
)

// BenchmarkIdle reports the share of one core that an engine with four peers takes
// while nothing happens. The peers are in this process, and count as well.
func BenchmarkIdle(b *testing.B) {
	for name, cfg := range map[string]ucx.Config{
		"near": {Transports: "posix,sysv,cma"}, "tcp": {Transports: "tcp", Devices: "lo"},
	} {
		b.Run(name, func(b *testing.B) {
			e := openIdle(b, "idle", cfg)
			for i := range 4 {
				other := openIdle(b, fmt.Sprint("peer ", i), cfg)
				joinIdle(b, e, other)
				joinIdle(b, other, e)
			}
			time.Sleep(100 * time.Millisecond) // what connecting left to do
			for b.Loop() {
				start, before := time.Now(), cpuTime(b)
				time.Sleep(2 * time.Second)
				b.ReportMetric(100*float64(cpuTime(b)-before)/float64(time.Since(start)), "%core")
			}
		})
	}
}

// cpuTime is what this process has used so far.
func cpuTime(b *testing.B) time.Duration {
	var u unix.Rusage
	if err := unix.Getrusage(unix.RUSAGE_SELF, &u); err != nil {
		b.Fatal(err)
	}
	return time.Duration(u.Utime.Nano() + u.Stime.Nano())
}

func openIdle(b *testing.B, name string, cfg ucx.Config) *engine.Engine {
	u, err := ucx.New(cfg)
	if err != nil {
		drivertest.SkipIfUnavailable(b, err)
	}
	e, err := engine.Open(engine.Config{Name: name, Backends: []driver.Backend{u}})
	if err != nil {
		b.Fatal(err)
	}
	b.Cleanup(func() {
		if err := e.Close(); err != nil {
			b.Errorf("close %s: %v", name, err)
		}
	})
	return e
}

func joinIdle(b *testing.B, from, to *engine.Engine) {
	d, err := to.Describe()
	if err == nil {
		_, err = from.Connect(context.Background(), d)
	}
	if err != nil {
		b.Fatal(err)
	}
}
