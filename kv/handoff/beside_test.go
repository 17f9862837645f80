// SPDX-License-Identifier: Apache-2.0

package handoff

import (
	"context"
	"sync"
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

// TestCloseWaitsForWhatIsLeft closes a Sender while a Push gives back what it holds.
func TestCloseWaitsForWhatIsLeft(t *testing.T) { testkit.InVirtualTime(t, closeWaitsForWhatIsLeft) }

func closeWaitsForWhatIsLeft(t *testing.T) {
	dropping, goOn := make(chan struct{}), make(chan struct{})
	var first sync.Once
	p := newPair(t, setup{backend: func(t testing.TB) driver.Backend {
		return counted{newMem(t), func() {}, func() {
			first.Do(func() {
				close(dropping)
				<-goOn
			})
		}}
	}})
	push, q := p.begin(t, 1, 1, 2)
	go push.Abort(within(t))
	<-dropping
	closed := make(chan error, 1)
	go func() { closed <- p.sender.Close() }()
	select {
	case err := <-closed:
		t.Errorf("Close has not waited for a Push: %v", err)
	case <-time.After(atOnce):
	}
	close(goOn)
	<-push.Ended()
	if !t.Failed() {
		require.NoError(t, <-closed)
	}
	<-q.Done()
}

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
	require.ErrorIs(t, push.post(0), engine.ErrAborted)
	<-push.window
	<-push.Ended()
	<-q.Done()
	require.EqualValues(t, 1, imports.Load(), "the one that is moored")
}
