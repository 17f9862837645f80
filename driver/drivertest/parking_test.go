// SPDX-License-Identifier: Apache-2.0

package drivertest

import (
	"context"
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/sluicehq/sluice/backends/shm"
	"github.com/sluicehq/sluice/driver"
)

// parking is what the next mover of this process does in Submit.
var parking atomic.Pointer[func()]

// parkedPeer has a spot in front of everything that shm does.
type parkedPeer struct{ driver.Peer }

func (p parkedPeer) Submit(tag uint64, b *driver.Batch) error {
	if f := parking.Swap(nil); f != nil {
		go func() {
			(*f)()
			_ = p.Peer.Submit(tag, b)
		}()
		return nil
	}
	return p.Peer.Submit(tag, b)
}

type parkedBackend struct{ driver.Backend }

func (b parkedBackend) Connect(ctx context.Context, addr []byte) (driver.Peer, error) {
	p, err := b.Backend.Connect(ctx, addr)
	if err != nil {
		return nil, err
	}
	return parkedPeer{p}, nil
}

// parkedHarness is shm whose movers stand before they begin.
var parkedHarness = Harness{
	Name: "parked",
	New: func() (driver.Backend, error) {
		b, err := shm.New(shm.Config{})
		return parkedBackend{b}, err
	},
	Park: func(_ string, f func()) {
		parking.Store(nil)
		if f != nil {
			parking.Store(&f)
		}
	},
	Spots: []string{"submit"},
}

// TestParkedMoverIsNoticed has an owner that does not revoke meet a mover that stands.
func TestParkedMoverIsNoticed(t *testing.T) {
	h := parkedHarness
	find(t, "FenceParked").perform(t, h.withDefaults(), Processes)
	h.New = func() (driver.Backend, error) {
		b, err := shm.New(shm.Config{})
		return sabotageOf(b, sabotage{
			revoke: func(*saboteurMemory, context.Context) error { return nil },
		}), err
	}
	h.Limit = 2 * time.Second // of which the finding is that it passes
	notices(t, find(t, "FenceParked"), h, Processes)
}

// TestEachCheckHasAMisdeed: a check that no test of this package names may be one that cannot
// fail.
func TestEachCheckHasAMisdeed(t *testing.T) {
	files, err := filepath.Glob("*_test.go")
	require.NoError(t, err)
	var text strings.Builder
	for _, f := range files {
		b, err := os.ReadFile(f)
		require.NoError(t, err)
		text.Write(b)
	}
	for _, c := range checks {
		require.Regexp(t, regexp.MustCompile(`"`+c.name+`"`), text.String(),
			"no misdeed shows that this check can fail: %s", c.name)
	}
}
