// SPDX-License-Identifier: Apache-2.0

package tcp

import (
	"bytes"
	"io"
	"math"
	"net"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/sluicehq/sluice/driver"
	"github.com/sluicehq/sluice/internal/session"
	"github.com/sluicehq/sluice/internal/testing/testkit"
)

func TestHeader(t *testing.T) {
	want := header{length: 32, kind: kindWrite, flags: 1, status: 3, count: 1, key: 5, ticket: 6,
		id: 7, message: 8, stamp: 9}
	b := want.append(nil)
	var got header
	if err := got.decode((*[headBytes]byte)(b)); err != nil || got != want || len(b) != headBytes {
		t.Errorf("decoded %+v (%v), want %+v", got, err, want)
	}
	b[4]++
	wantError(t, "another version", got.decode((*[headBytes]byte)(b)), driver.ErrVersion)
}

// Every length has its bound, and what does not fit together is refused.
func TestUnsoundHeaders(t *testing.T) {
	for _, h := range []header{
		{}, {kind: kindsEnd}, {kind: 255},
		{kind: kindWrite, count: 0, length: 20}, {kind: kindWrite, count: 1, length: entryBytes},
		{kind: kindWrite, count: entriesMax + 1, length: (entriesMax+1)*entryBytes + 1},
		{kind: kindWrite, count: 1, length: entryBytes + partBytes + 1}, {kind: kindWrite, count: 1,
			length: math.MaxUint32},
		{kind: kindRead, count: 1, length: entryBytes + 1}, {kind: kindRead, flags: flagPattern,
			count: slotsMax + 1, length: patternBytes + slotBytes*(slotsMax+1)},
		{kind: kindWrite, flags: flagPattern, count: 2, length: patternBytes + 2*slotBytes},
		{kind: kindStop, length: 1}, {kind: kindRead, count: math.MaxUint32,
			length: math.MaxUint32},
		{kind: kindData}, {kind: kindData, length: partBytes + 1},
		{kind: kindNotif, length: messageLimit + 1},
		{kind: kindHello, length: bodyMax + 1}, {kind: kindAck, length: 1},
		{kind: kindPing, length: 1},
	} {
		var got header
		wantError(t, "an unsound head", got.decode((*[headBytes]byte)(h.append(nil))),
			driver.ErrCorrupt)
	}
}

// FuzzFrames gives an owner and an initiator what a peer may say: anything. They take it or
// refuse it, and no byte goes beside the memory that was named.
func FuzzFrames(f *testing.F) {
	m := header{kind: kindWrite, count: 1, key: 0, ticket: fuzzTicket, stamp: math.MaxInt64}
	f.Add(frame(m, append(appendEntry(nil, 16, 8), 1, 2, 3, 4, 5, 6, 7, 8)))
	f.Add(frame(header{kind: kindNotif, message: 1, stamp: math.MaxInt64}, []byte("hello")))
	f.Add(frame(header{kind: kindRead, count: 2, ticket: fuzzTicket},
		appendEntry(appendEntry(nil, 0, 8), 8, 8)))
	part := fragment{bytes: 24, skip: 2, pattern: driver.Pattern{
		Run: 3, Count: 3, Loops: []driver.Loop{{N: 3, Remote: 4}},
		Remote: driver.Side{Base: 1, Stride: 9, Step: 1, First: 1, Per: 2, List: []uint32{1, 0}},
	}}
	named := part.append(nil)
	m.flags, m.count = flagPattern, 2
	f.Add(frame(m, append(named, make([]byte, 24)...)))
	f.Add(frame(header{kind: kindRead, flags: flagPattern, count: 2, ticket: fuzzTicket}, named))
	part.pattern.Remote.List = []uint32{1, 9} // past the end
	named = part.append(nil)
	f.Add(frame(m, append(named, make([]byte, 24)...)))
	f.Add(frame(header{kind: kindRead, flags: flagPattern, count: 2, ticket: fuzzTicket}, named))
	f.Add(frame(header{kind: kindVoid, message: 3}, nil))
	f.Add(frame(header{kind: kindStop}, nil))
	f.Add(frame(header{kind: kindStopped}, nil))
	f.Add(frame(header{kind: kindConfirm, id: 1}, nil))
	f.Add(frame(header{kind: kindAnswer}, []byte("an answer")))
	f.Add(frame(header{kind: kindCredit, count: 1}, nil))
	f.Add(frame(header{kind: kindAck, id: 1 << 32}, nil))
	f.Add(frame(header{kind: kindData, id: 1 << 32}, make([]byte, 8)))
	f.Fuzz(func(t *testing.T, said []byte) {
		b := &Backend{memories: session.KeyTable[memory]{Most: 4}, clock: testkit.NewClock()}
		b.cfg.EnsureDefaults()
		b.done.Init(8)
		mem := bytes.Repeat([]byte{0xAA}, 96)
		key, _, err := b.memories.Take()
		require.NoError(t, err)
		seg := driver.Segment{Kind: driver.DRAM, Len: 32, Mem: mem[32:64:64]}
		m := &memory{b: b, key: key, seg: seg}
		m.ticket.Store(fuzzTicket)
		b.memories.Put(key, m)
		for index := control; index <= express; index++ {
			fuzzEnd(b, newInbound(b, 2), index, said)
			p := newPeer(b, address{}, 2)
			p.dieOnce.Do(func() {}) // nothing is there to end
			fuzzEnd(b, p, index, said)
		}
		if guard := bytes.Repeat([]byte{0xAA}, 32); !bytes.Equal(mem[:32], guard) ||
			!bytes.Equal(mem[64:], guard) {
			t.Error("bytes beside the memory have changed")
		}
	})
}

const fuzzTicket = 0x1234_5678_9ABC_DEF0

// saying is a connection over which these bytes come, and then its end.
type saying struct {
	net.Conn
	io.Reader
}

func (s saying) Read(b []byte) (int, error) { return s.Reader.Read(b) }

// fuzzEnd has one end take what was said, as if it came over one connection. Nothing is written,
// and nothing is waited for.
func fuzzEnd(b *Backend, e side, index int, said []byte) {
	conns := []*conn{}
	for i := range 2 {
		c := &conn{b: b, side: e, index: i, tls: true, net: saying{nil, bytes.NewReader(said)},
			resume: make(chan struct{}, 1), writerWork: make(chan struct{}, 1),
			closed: make(chan struct{})}
		c.writeRequests.Store(1)  // somebody writes already
		c.closeOnce.Do(func() {}) // and there is no socket
		close(c.closed)
		conns = append(conns, c)
	}
	switch e := e.(type) {
	case *inbound:
		copy(e.conns, conns)
	case *peer:
		copy(e.conns, conns)
	}
	_ = e.serve(conns[index])
}

func FuzzAddress(f *testing.F) {
	good := address{owner: session.NewOwner(), places: []string{"10.0.0.1:7000", "[::1]:1",
		"eth.example:65535"}}
	b, err := good.encode()
	require.NoError(f, err)
	f.Add(b)
	f.Add([]byte(addressName))
	f.Add([]byte("tcp1"))
	f.Fuzz(func(t *testing.T, b []byte) {
		a, err := decodeAddress(b)
		if err != nil {
			return
		}
		again, err := a.encode()
		if err != nil || !bytes.Equal(again, b) {
			t.Errorf("%x decodes to %+v, which encodes to %x (%v)", b, a, again, err)
		}
	})
}
