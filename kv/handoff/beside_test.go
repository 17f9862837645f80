// SPDX-License-Identifier: Apache-2.0

package handoff

import (
	"context"
	"sync/atomic"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/sluicehq/sluice/driver"
	"github.com/sluicehq/sluice/engine"
	"github.com/sluicehq/sluice/internal/testing/testkit"
)

// atOnce is how long a test waits for what must not happen.
const atOnce = 100 * time.Millisecond

// TestLayerBesideTheEnd: a Push has not ended while a call of Layer is under way, which would
// import anew what was closed.
func TestLayerBesideTheEnd(t *testing.T) { testkit.InVirtualTime(t, layerBesideTheEnd) }

func layerBesideTheEnd(t *testing.T) {
	var imports atomic.Int64
	p := newPair(t, setup{backend: func(t testing.TB) driver.Backend {
		return counted{newMem(t), func() { imports.Add(1) }, func() { imports.Add(-1) }}
	}})
	push, q := p.begin(t, 1, 1, 2)
	push.window <- struct{}{} // as Layer does, before it lists anything
	over, cancel := context.WithCancel(context.Background())
	cancel()
	_ = push.Abort(over)
	select {
	case <-push.Ended():
		t.Error("a Push has ended beside a call of Layer")
	case <-time.After(atOnce):
	}
	require.ErrorIs(t, push.post(&groupFlight{}, nil), engine.ErrAborted)
	<-push.Ended()
	<-q.Done()
	require.EqualValues(t, 1, imports.Load(), "the one that is kept")
}
