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
	"github.com/sluicehq/sluice/internal/testing/virtual"
)

// atOnce is how long a test waits for what must not happen.
const atOnce = 100 * time.Millisecond

// TestCloseWaitsForWhatIsLeft closes a Sender while a Push gives back what it holds.
func TestCloseWaitsForWhatIsLeft(t *testing.T) { virtual.Time(t, closeWaitsForWhatIsLeft) }

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
func TestLayerBesideTheEnd(t *testing.T) { virtual.Time(t, layerBesideTheEnd) }

func layerBesideTheEnd(t *testing.T) {
	var imports atomic.Int64
	var push *Push
	p := newPair(t, setup{backend: func(t testing.TB) driver.Backend {
		return counted{newMem(t), func() { imports.Add(1) }, func() { imports.Add(-1) }}
	}, sender: func(c *SenderConfig) {
		c.Checksum = func(int) bool { // called by Layer, before it lists anything
			over, cancel := context.WithCancel(context.Background())
			cancel()
			_ = push.Abort(over)
			select {
			case <-push.Ended():
			case <-time.After(atOnce):
			}
			return false
		}
	}})
	var q *Request
	push, q = p.begin(t, 1, 1, 2)
	require.ErrorIs(t, push.Layer(within(t), 0), engine.ErrAborted)
	<-push.Ended()
	<-q.Done()
	require.EqualValues(t, 1, imports.Load(), "the one that is moored")
}
