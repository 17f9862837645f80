// SPDX-License-Identifier: Apache-2.0

package bench

import (
	"errors"
	"io"
	"testing"

	"github.com/stretchr/testify/require"
	"golang.org/x/sys/unix"

	"github.com/sluicehq/sluice/driver"
	"github.com/sluicehq/sluice/internal/hostmem"
	"github.com/sluicehq/sluice/internal/testing/leak"
)

// landlord is a backend with memory of its own.
type landlord struct{ driver.Backend }

func (landlord) Alloc(n uint64) (driver.Segment, io.Closer, error) {
	b, err := unix.Mmap(-1, 0, int(n), unix.PROT_READ|unix.PROT_WRITE, unix.MAP_SHARED|
		unix.MAP_ANON)
	return driver.Segment{Kind: driver.DRAM, Len: n, Mem: b}, &lease{b}, err
}

type lease struct{ b []byte }

func (l *lease) Close() error {
	if l.b == nil {
		return nil
	}
	b := l.b
	l.b = nil
	return unix.Munmap(b)
}

// TestSideHasTheMemoryThatIsWanted: a backend's own where it has such, and host
// memory all the same where that is asked for.
func TestSideHasTheMemoryThatIsWanted(t *testing.T) {
	leak.Check(t, hostmem.InUse)
	s := Shape{Op: driver.Write, Size: 4096, Batch: 1, Threads: 1}
	for use, want := range map[Memory]string{BackendMemory: "mem", HostMemory: "host"} {
		side, l, err := Loop([]driver.Backend{landlord{memBackend(t)[0]}}, "mem", 4096, 4096, use)
		require.NoError(t, err)
		r, err := Run(t.Context(), l, s, Options{Rounds: 1, Slice: 1})
		if err != nil || r.Memory != want || side.From() != want || len(side.memory) != 2 {
			t.Errorf("%s: memory %q, side %q: %v", use, r.Memory, side.From(), err)
		}
		for _, m := range side.memory {
			if m.From() != want {
				t.Errorf("%s: an end of %q", use, m.From())
			}
		}
		if err := errors.Join(side.Close(), side.Close()); err != nil {
			t.Error(err)
		}
	}
}
