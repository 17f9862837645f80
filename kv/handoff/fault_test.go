// SPDX-License-Identifier: Apache-2.0

package handoff

import (
	"errors"
	"slices"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/sluicehq/sluice/driver"
	"github.com/sluicehq/sluice/engine"
	"github.com/sluicehq/sluice/internal/testing/testkit"
	"github.com/sluicehq/sluice/kv/layout"
	"github.com/sluicehq/sluice/kv/pool"
)

func TestFullPoolHoldsRequestsBack(t *testing.T) { over(t, fullPoolHoldsRequestsBack) }

func fullPoolHoldsRequestsBack(t *testing.T, open func(testing.TB) driver.Backend) {
	p := newPair(t, setup{backend: open, blocks: 4})
	held := p.handOver(t, 1, 1, 2, 3)
	begun := make(chan *Push)
	go func() {
		push, err := p.sender.Begin(within(t), p.prefill.peer, 2, p.request(t, 7, 8))
		if err != nil {
			t.Error(err)
		}
		begun <- push
	}()
	await(t, "a request waits", func() bool { return p.pool.Stats().Waiting == 1 })
	select {
	case <-begun:
		t.Fatal("a request began without room")
	case <-time.After(20 * time.Millisecond):
	}
	held.Release()
	push := <-begun
	p.push(t, push)
	q, _ := p.receiver.Accept(within(t))
	<-q.Done()
	q.Release()
}

func TestWaitForRoomIsBounded(t *testing.T) { testkit.InVirtualTime(t, waitForRoomIsBounded) }

func waitForRoomIsBounded(t *testing.T) {
	p := newPair(t, setup{blocks: 2, receiver: func(c *ReceiverConfig) {
		c.MeetTimeout = 20 * time.Millisecond
	}})
	held := p.handOver(t, 1, 1, 2)
	defer held.Release()
	_, err := p.sender.Begin(within(t), p.prefill.peer, 2, p.request(t, 7, 8))
	var end *EndError
	if !errors.As(err, &end) || !errors.Is(err, engine.ErrTimeout) || !end.Remote ||
		end.Peer != "decode" {
		t.Errorf("begin without room: %v", err)
	}
}

func TestRefusals(t *testing.T) {
	p := newPair(t, setup{blocks: 4, receiver: func(c *ReceiverConfig) { c.RequestsMax = 2 }})
	begin := func(ids ...uint64) error {
		_, err := p.sender.Begin(within(t), p.prefill.peer, 9, p.request(t, ids...))
		return err
	}
	if err := begin(1, 2, 3, 4, 5); !errors.Is(err, pool.ErrTooLarge) {
		t.Errorf("5 blocks into a pool of 4: %v", err)
	}
	a, qa := p.begin(t, 1, 1)
	b, qb := p.begin(t, 2, 2)
	defer qa.Release()
	defer qb.Release()
	if err := begin(3); !errors.Is(err, ErrRefused) {
		t.Errorf("a third request of 2: %v", err)
	}
	p.push(t, a)
	p.push(t, b)
	if s := p.receiver.Stats(); s.Ended[TooLarge] != 1 || s.Ended[Refused] != 1 {
		t.Errorf("%+v", s)
	}
	for _, q := range []*Push{a, b} {
		if err := q.Abort(within(t)); err != nil || q.Err() != nil {
			t.Errorf("abort of a finished request: %v, %v", err, q.Err())
		}
	}
	p.pool.Close()
	if err := begin(4); !errors.Is(err, engine.ErrClosed) {
		t.Errorf("a closed pool: %v", err)
	}
}

func TestMisuse(t *testing.T) {
	p := newPair(t, setup{})
	for what, blocks := range map[string][]Block{
		"a block past the pool": {{Local: prefillBlocks}},
		"too many blocks":       make([]Block, RequestBlocksMax+1),
	} {
		if _, err := p.sender.Begin(within(t), p.prefill.peer, 1, blocks); !errors.Is(err,
			engine.ErrBounds) {
			t.Errorf("%s: %v", what, err)
		}
	}
	if _, err := p.sender.Begin(within(t), nil, 1, nil); !errors.Is(err, engine.ErrBounds) {
		t.Errorf("no peer: %v", err)
	}
}

func TestBadConfigs(t *testing.T) {
	p := newPair(t, setup{})
	huge, _ := layout.New(small, layout.Options{Blocks: 1 << 20})
	sender := SenderConfig{Region: p.prefill.region, Geometry: p.prefill.geometry}
	receiver := ReceiverConfig{Region: p.decode.region, Geometry: p.decode.geometry, Pool: p.pool}
	for what, change := range map[string]func(*SenderConfig, *ReceiverConfig){
		"no region": func(s *SenderConfig, r *ReceiverConfig) {
			s.Region, r.Region = nil, nil
		},
		"no geometry": func(s *SenderConfig, r *ReceiverConfig) {
			s.Geometry, r.Geometry = nil, nil
		},
		"a region too small": func(s *SenderConfig, r *ReceiverConfig) {
			s.Geometry, r.Geometry = huge, huge
		},
		"a negative timeout": func(s *SenderConfig, r *ReceiverConfig) {
			s.LayerTimeout, r.IdleTimeout = -1, -1
		},
		"one of its own kind": func(*SenderConfig, *ReceiverConfig) {},
	} {
		s, r := sender, receiver
		change(&s, &r)
		if _, err := NewSender(p.prefill.mux, s); err == nil {
			t.Errorf("a sender with %s", what)
		}
		if _, err := NewReceiver(p.decode.mux, r); err == nil {
			t.Errorf("a receiver with %s", what)
		}
	}
}

func TestGeometriesMustAgree(t *testing.T) {
	other := small
	other.Parts = slices.Clone(small.Parts)
	other.Parts[1].Name = "keys"
	g, err := layout.New(other, layout.Options{Blocks: prefillBlocks})
	require.NoError(t, err)
	p := newPair(t, setup{sender: func(c *SenderConfig) { c.Geometry = g }})
	if _, err := p.sender.Begin(within(t), p.prefill.peer, 1, []Block{{}}); !errors.Is(err,
		ErrGeometry) {
		t.Errorf("begin with another geometry: %v", err)
	}
}

func TestReasonsHaveWords(t *testing.T) {
	var words []string
	for r := Aborted; r.valid(); r++ {
		words = append(words, r.String())
		if err := (&EndError{Reason: r}); r != Failed && reasonOf(err) != r {
			t.Errorf("the error of reason %v has reason %v", r, reasonOf(err))
		}
	}
	slices.Sort(words)
	if len(slices.Compact(words)) != len(reasons)-1 || slices.Contains(words, "") {
		t.Errorf("%q", words)
	}
}
