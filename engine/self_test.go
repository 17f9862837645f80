// SPDX-License-Identifier: Apache-2.0

package engine

import (
	"errors"
	"fmt"
	"runtime"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/sluicehq/sluice/driver"
	"github.com/sluicehq/sluice/engine/internal/exchange"
	"github.com/sluicehq/sluice/internal/testing/virtual"
	"github.com/sluicehq/sluice/internal/wire"
)

// TestSelfIsRenewed has the connection to itself break.
func TestSelfIsRenewed(t *testing.T) { virtual.Time(t, selfIsRenewed) }

func selfIsRenewed(t *testing.T) {
	f := &fake{manual: true}
	p, r, m := overFake(t, f, 20*time.Millisecond)
	tr := transfer(t, p, Write)
	scattered(t, tr, r, m, 1)
	check(t, tr.Post())
	if err := tr.Wait(within(t)); !errors.Is(err, ErrTimeout) {
		t.Errorf("got %v", err)
	}
	<-p.Lost()
	q, err := p.e.Self()
	check(t, err)
	check(t, transfer(t, q, Write).Add(r, 0, remote(t, q, "r"), 0, 1))
	if n := p.e.Stats().Peers; n != 1 {
		t.Errorf("%d peers are known", n)
	}
	if names := q.Remotes(); len(names) != 1 || names[0] != "r" {
		t.Errorf("the own regions are %q", names)
	}
}

func TestSelfKnowsItsRegions(t *testing.T) {
	e := open(t, "e")
	p, err := e.Self()
	check(t, err)
	r := register(t, e, "r", 64)
	if names := p.Remotes(); len(names) != 1 || names[0] != "r" {
		t.Errorf("the own regions are %q", names)
	}
	remote(t, p, "r")
	check(t, r.Close())
	if names := p.Remotes(); len(names) != 0 {
		t.Errorf("closed, and still %q", names)
	}
}

// TestSelfForgetsRegions that are closed: a program that registers one for each request keeps none
// of them.
func TestSelfForgetsRegions(t *testing.T) {
	e := open(t, "e")
	p, err := e.Self()
	require.NoError(t, err)
	dst := register(t, e, "dst", 64)
	for i := range 10 {
		r := register(t, e, fmt.Sprint("request ", i), 64)
		tr := transfer(t, p, Read)
		check(t, tr.Add(dst, 0, remote(t, p, r.Name()), 0, 64))
		run(t, tr)
		check(t, tr.Close())
		check(t, r.Close())
	}
	require.Empty(t, p.remotes)
}

// TestFailedConnectsLeaveNothing of the chains that a peer would have had.
func TestFailedConnectsLeaveNothing(t *testing.T) {
	e := open(t, "e")
	gone, err := wire.Encode(nil, &wire.Description{Engine: wire.ID{7}, Name: "gone",
		Backends: []wire.Backend{{Name: "tcp", Addr: []byte("x")}}})
	require.NoError(t, err)
	heap := func() uint64 {
		var m runtime.MemStats
		runtime.GC()
		runtime.ReadMemStats(&m)
		return m.HeapAlloc
	}
	const times = 50_000
	before := heap()
	for range times {
		_, err := e.Connect(t.Context(), gone)
		require.ErrorIs(t, err, ErrNoRoute)
	}
	require.Less(t, heap(), before+50*times, "bytes are kept for each")
}

// TestAnswersMakeNoSender: a hello that comes as an answer, by a connection of ours, begins no
// sender, as no last word would end it.
func TestAnswersMakeNoSender(t *testing.T) {
	a, b := open(t, "a"), open(t, "b")
	register(t, b, "r", 64)
	p := connect(t, a, b)
	l := a.lanes[0]
	l.receiveMu.Lock()
	defer l.receiveMu.Unlock()
	_, forProgram := l.take(&driver.Message{Conn: p.conns[0].p.Conn(), Data: b.hello(
		exchange.Secret{})})
	require.False(t, forProgram)
	require.Empty(t, l.senders)
}
