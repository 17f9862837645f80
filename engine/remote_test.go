// SPDX-License-Identifier: Apache-2.0

package engine

import (
	"context"
	"errors"
	"sync/atomic"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/sluicehq/sluice/driver"
	"github.com/sluicehq/sluice/internal/hostmem"
	"github.com/sluicehq/sluice/internal/testing/virtual"
)

// TestStagingWithoutProof writes through a buffer that the backend never lets go
// of: it may neither be used again nor be unmapped.
func TestStagingWithoutProof(t *testing.T) { virtual.Time(t, stagingWithoutProof) }

func stagingWithoutProof(t *testing.T) {
	p, _, m := overFake(t, &fake{manual: true, brokenClose: true}, 20*time.Millisecond)
	before := hostmem.InUse()["staging"]
	if n, err := m.WriteAt([]byte("x"), 0); n != 0 || !errors.Is(err, ErrTimeout) {
		t.Errorf("wrote %d, %v", n, err)
	}
	if n := len(p.staging); n != 0 {
		t.Errorf("%d buffers are kept for reuse", n)
	}
	if n := hostmem.InUse()["staging"] - before; n != stagingBytes {
		t.Errorf("%d bytes are still mapped, want the %d that somebody may read", n, stagingBytes)
	}
}

// TestStagingThatIsNotFenced stays mapped: without the proof a backend may still use the bytes.
func TestStagingThatIsNotFenced(t *testing.T) {
	var broken atomic.Bool
	p, _, m := overFake(t, &fake{onRevoke: func(context.Context) error {
		if broken.Load() {
			return ErrTimeout
		}
		return nil
	}}, limit)
	before := hostmem.InUse()["staging"]
	_, err := m.WriteAt([]byte("x"), 0)
	require.NoError(t, err)
	broken.Store(true)
	require.ErrorIs(t, p.Close(), ErrTimeout)
	require.EqualValues(t, stagingBytes, hostmem.InUse()["staging"]-before)
	broken.Store(false)
}

// TestImportIsTriedAgain has an import that fails for a reason that passes.
func TestImportIsTriedAgain(t *testing.T) {
	for _, c := range []struct {
		err   error
		tries int
	}{{ErrTimeout, 2}, {ErrFull, 2}, {ErrRevoked, 1}, {driver.ErrBadToken, 1}} {
		tries := 0
		f := &fake{}
		f.onImport = func() error {
			if tries++; tries == 1 {
				return c.err
			}
			return nil
		}
		p, r, m := overFake(t, f, limit)
		if err := transfer(t, p, Write).Add(r, 0, m, 0, 1); !errors.Is(err, c.err) {
			t.Errorf("the first time: %v, want %v", err, c.err)
		}
		err := transfer(t, p, Write).Add(r, 0, m, 0, 1)
		if tries != c.tries || (err == nil) != (tries == 2) {
			t.Errorf("after %v: tried %d times, then %v", c.err, tries, err)
		}
	}
}

// TestImportOverALostConnection: that the engine closes such a connection is no reason to tell.
func TestImportOverALostConnection(t *testing.T) {
	f := &fake{}
	p, r, _ := overFake(t, f, limit)
	l, err := r.Lease(0, 8, LeaseOptions{})
	require.NoError(t, err)
	f.onImport = func() error {
		for _, c := range p.conns {
			if c == nil {
				continue
			}
			if over, ok := c.p.(*fakePeer); ok {
				over.lose()
				<-c.gone
			}
		}
		return driver.ErrClosed
	}
	_, err = p.Import(l.Token())
	require.ErrorIs(t, err, ErrPeerLost)
	require.NotErrorIs(t, err, ErrClosed)
}
