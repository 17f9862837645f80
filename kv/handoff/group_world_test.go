// SPDX-License-Identifier: Apache-2.0

package handoff

import (
	"bytes"
	"encoding/binary"
	"fmt"
	"hash/fnv"
	"io"
	"math/rand/v2"
	"slices"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/sluicehq/sluice/backends/tcp"
	"github.com/sluicehq/sluice/driver"
	"github.com/sluicehq/sluice/engine"
	"github.com/sluicehq/sluice/internal/testing/testkit"
	"github.com/sluicehq/sluice/kv/layout"
)

// member is one rank of a group, with its engine.
type member struct {
	eng     *engine.Engine
	mux     *Mux
	side    *layout.Side
	regions []*engine.Region
	peers   []*engine.Peer // of the other group
	sender  *GroupSender
	receive *GroupReceiver
	backend driver.Backend
	closed  bool // by the test

	mu   sync.Mutex
	free [][]uint32 // blocks by group
}

// crowd is two groups of ranks in one process.
type crowd struct {
	plan     *layout.Plan
	from, to []*member
	number   uint64
}

// crowdSetup says how a crowd differs from the ordinary one.
type crowdSetup struct {
	from, to []*layout.Side
	backend  func(testing.TB) driver.Backend
	config   func(sends bool, c *GroupConfig)
	// memory of a rank; nil: DRAM. HBM is that of the software stand-in.
	alloc    func(testing.TB, driver.Backend, uint64) (driver.Segment, io.Closer)
	engine   func(*engine.Config)
	unfilled bool // leave memory as it is: pages that nothing touches cost nothing
}

func newTCP(t testing.TB) driver.Backend {
	t.Helper()
	b, err := tcp.New(tcp.Config{Plaintext: true, Listen: "127.0.0.1:0"})
	require.NoError(t, err)
	return b
}

// overAll is over, with tcp.
func overAll(t *testing.T, test func(t *testing.T, open func(testing.TB) driver.Backend)) {
	over(t, test)
	t.Run("tcp", func(t *testing.T) { test(t, newTCP) })
}

func newCrowd(t testing.TB, s crowdSetup) *crowd {
	t.Helper()
	testkit.CheckLeaks(t)
	if s.backend == nil {
		s.backend = newMem
	}
	plan, err := layout.NewPlan(s.from, s.to)
	require.NoError(t, err)
	c := &crowd{plan: plan}
	for i, side := range s.from {
		c.from = append(c.from, newMember(t, fmt.Sprintf("prefill-%d", i), side, s))
	}
	for i, side := range s.to {
		c.to = append(c.to, newMember(t, fmt.Sprintf("decode-%d", i), side, s))
	}
	for _, p := range c.from {
		for _, d := range c.to {
			p.peers = append(p.peers, connect(t, p.eng, d.eng))
			d.peers = append(d.peers, connect(t, d.eng, p.eng))
		}
	}
	for i, m := range c.from {
		m.sender, err = NewGroupSender(m.mux, c.config(m, i, true, s))
		require.NoError(t, err)
	}
	for i, m := range c.to {
		m.receive, err = NewGroupReceiver(m.mux, c.config(m, i, false, s))
		require.NoError(t, err)
	}
	t.Cleanup(func() { c.close(t) })
	return c
}

func (c *crowd) config(m *member, index int, sends bool, s crowdSetup) GroupConfig {
	cfg := GroupConfig{Plan: c.plan, Index: index, Regions: m.regions, Peers: m.peers,
		Limits: Limits{MeetTimeout: limit, LayerTimeout: limit, IdleTimeout: limit,
			NotifyTimeout: limit, RevokeTimeout: limit}}
	cfg.Summer, _ = m.backend.(layout.Summer)
	if s.config != nil {
		s.config(sends, &cfg)
	}
	return cfg
}

// close closes all ranks, and checks that no request has left anything.
func (c *crowd) close(t testing.TB) {
	for _, m := range c.from {
		if err := m.sender.Close(); !m.closed {
			require.NoError(t, err)
		}
		require.Empty(t, m.sender.pushes)
		require.Empty(t, m.sender.links)
		require.Zero(t, m.sender.places.Load())
	}
	for _, m := range c.to {
		if err := m.receive.Close(); !m.closed {
			require.NoError(t, err)
		}
		require.Empty(t, m.receive.requests)
		require.Empty(t, m.receive.links)
		require.Zero(t, m.receive.places.Load())
		require.Zero(t, m.receive.opened)
		require.Equal(t, make([]int, len(c.from)), m.receive.begun)
	}
	for _, m := range slices.Concat(c.from, c.to) {
		if !m.closed {
			require.Zero(t, m.eng.Stats().Leases, "leases of a rank")
		}
	}
}

func newMember(t testing.TB, name string, side *layout.Side, s crowdSetup) *member {
	t.Helper()
	backend := s.backend(t)
	cfg := engine.Config{Name: name, Backends: []driver.Backend{backend}, Spin: testkit.Spin()}
	if backend.Caps().MessageMax == 0 { // then another one carries them
		cfg.Backends = append(cfg.Backends, newMem(t))
	}
	if s.engine != nil {
		s.engine(&cfg)
	}
	eng, err := engine.Open(cfg)
	require.NoError(t, err)
	m := &member{eng: eng, mux: NewMux(eng), side: side, backend: backend}
	var memory []io.Closer
	t.Cleanup(func() {
		m.mux.Close()
		require.NoError(t, eng.Close())
		for _, b := range memory {
			require.NoError(t, b.Close())
		}
	})
	for _, area := range side.Regions {
		if area.Bytes == 0 {
			m.regions = append(m.regions, nil)
			continue
		}
		seg, b := s.segment(t, eng, backend, area.Bytes)
		memory = append(memory, b)
		r, err := eng.Register(area.Name, seg)
		require.NoError(t, err)
		if !s.unfilled {
			copy(bytesOf(r), bytes.Repeat([]byte{poison}, len(bytesOf(r))))
		}
		m.regions = append(m.regions, r)
	}
	r := rand.New(rand.NewPCG(uint64(len(name)), uint64(name[len(name)-1])))
	for _, g := range side.Groups {
		var blocks []uint32
		for _, b := range r.Perm(int(g.Blocks)) {
			blocks = append(blocks, uint32(b))
		}
		m.free = append(m.free, blocks)
	}
	return m
}

// segment is memory of a rank.
func (s *crowdSetup) segment(t testing.TB, eng *engine.Engine, b driver.Backend,
	n uint64) (driver.Segment, io.Closer) {
	if s.alloc != nil {
		return s.alloc(t, b, n)
	}
	m, err := eng.Alloc(n, engine.AllocOptions{Purpose: "kv"})
	require.NoError(t, err)
	return m.Segment(), m
}

// tables takes blocks for a request of so many tokens. give gives them back.
func (m *member) tables(t testing.TB, tokens uint64) layout.Tables {
	t.Helper()
	m.mu.Lock()
	defer m.mu.Unlock()
	tables := make(layout.Tables, len(m.side.Groups))
	for g := range m.side.Groups {
		n := 1
		for _, v := range m.side.Views {
			if v.Group == g && !m.side.Groups[g].State {
				n = (int(tokens) + v.Tokens - 1) / v.Tokens
			}
		}
		if m.side.Groups[g].Ring > 0 {
			n = m.side.Groups[g].Ring
		}
		require.LessOrEqual(t, n, len(m.free[g]), "too few blocks for the test")
		tables[g], m.free[g] = m.free[g][:n:n], m.free[g][n:]
	}
	return tables
}

func (m *member) give(t layout.Tables) {
	m.mu.Lock()
	defer m.mu.Unlock()
	for g := range t {
		m.free[g] = append(m.free[g], t[g]...)
	}
}

// each calls f for every cell of tokens from a to b of a request, token by token, from the
// documentation of layout.Group and layout.View alone.
func (m *member) each(tables layout.Tables, s layout.Span,
	f func(v *layout.View, unit int, token uint64, cell []byte)) {
	for j := range m.side.Views {
		v := &m.side.Views[j]
		g := m.side.Groups[v.Group]
		from, to := s.From, s.To
		if g.State {
			from, to = 0, uint64(v.Tokens)
		} else if g.Window > 0 && to > uint64(g.Window) {
			from = max(from, to-uint64(g.Window))
		}
		for n := from; n < to; n++ {
			slot := n / uint64(v.Tokens)
			if g.Ring > 0 {
				slot %= uint64(g.Ring)
			}
			block := uint64(tables[v.Group][slot])
			for u := range v.Count {
				at := v.Base + block*v.Block + uint64(u)*v.Unit + n%uint64(v.Tokens)*v.Token
				f(v, v.First+u, n, bytesOf(m.regions[v.Region])[at:at+v.Cell])
			}
		}
	}
}

// cellOf is the content of one cell of a request, from its coordinates alone.
func cellOf(request uint64, v *layout.View, unit int, token uint64) []byte {
	h := fnv.New64a()
	_, _ = h.Write([]byte(v.Part))
	for _, n := range []uint64{request, uint64(v.Layer), uint64(unit), token} {
		_ = binary.Write(h, binary.LittleEndian, n)
	}
	x := h.Sum64()
	b := make([]byte, 0, v.Cell+8)
	for uint64(len(b)) < v.Cell {
		b = binary.LittleEndian.AppendUint64(b, x)
		x = x*0x9E3779B97F4A7C15 + 1
	}
	return b[:v.Cell]
}

// job is one request with its blocks on all ranks.
type job struct {
	c        *crowd
	number   uint64
	span     layout.Span
	from, to []layout.Tables
	before   [][][]byte // memory of the receivers
	pushes   []*GroupPush
	requests []*GroupRequest
}

// newJob takes blocks, and fills those of the senders.
func (c *crowd) newJob(t testing.TB, s layout.Span) *job {
	t.Helper()
	c.number++
	j := &job{c: c, number: c.number, span: s, pushes: make([]*GroupPush, len(c.from)),
		requests: make([]*GroupRequest, len(c.to))}
	for _, m := range c.from {
		tables := m.tables(t, s.To)
		m.each(tables, layout.Span{To: s.To}, func(v *layout.View, unit int, token uint64,
			cell []byte) {
			copy(cell, cellOf(j.number, v, unit, token))
		})
		j.from = append(j.from, tables)
	}
	for _, m := range c.to {
		j.to = append(j.to, m.tables(t, s.To))
		j.before = append(j.before, m.memory())
	}
	return j
}

// give gives the blocks of a job back.
func (j *job) give() {
	for i, m := range j.c.from {
		m.give(j.from[i])
	}
	for i, m := range j.c.to {
		m.give(j.to[i])
	}
}

func (m *member) memory() (all [][]byte) {
	for _, r := range m.regions {
		var b []byte
		if r != nil {
			b = slices.Clone(bytesOf(r))
		}
		all = append(all, b)
	}
	return all
}

// begin opens and begins the request on all ranks.
func (j *job) begin(t testing.TB) {
	t.Helper()
	j.open(t)
	var all sync.WaitGroup
	errs := make([]error, len(j.pushes))
	for i, m := range j.c.from {
		all.Go(func() {
			j.pushes[i], errs[i] = m.sender.Begin(within(t), j.number, j.from[i], j.span)
		})
	}
	all.Wait()
	for i := range errs {
		require.NoError(t, errs[i], "rank %d", i)
	}
}

func (j *job) open(t testing.TB) {
	t.Helper()
	var err error
	for i, m := range j.c.to {
		j.requests[i], err = m.receive.Open(within(t), j.number, j.to[i], j.span)
		require.NoError(t, err, "rank %d", i)
	}
}

// layersOf lists the layers of a rank.
func layersOf(s *layout.Side) (list []int) {
	for _, v := range s.Views {
		if !slices.Contains(list, v.Layer) {
			list = append(list, v.Layer)
		}
	}
	slices.Sort(list)
	return list
}

// push hands all layers over, from all ranks at once, and finishes.
func (j *job) push(t testing.TB) {
	t.Helper()
	var all sync.WaitGroup
	for i, p := range j.pushes {
		all.Go(func() {
			for _, l := range layersOf(j.c.from[i].side) {
				if err := p.Layer(within(t), l); err != nil {
					t.Errorf("rank %d, layer %d: %v", i, l, err)
				}
			}
			if err := p.Finish(within(t)); err != nil {
				t.Errorf("finish rank %d: %v", i, err)
			}
		})
	}
	all.Wait()
}

// handOver hands a request over from all ranks, and checks every byte.
func (c *crowd) handOver(t testing.TB, s layout.Span) *job {
	t.Helper()
	j := c.newJob(t, s)
	j.begin(t)
	j.push(t)
	j.check(t)
	return j
}

// check waits for all receivers, and compares every byte of their memory.
func (j *job) check(t testing.TB) {
	t.Helper()
	for i := range j.requests {
		require.Equal(t, layersOf(j.c.to[i].side), j.ready(t, i), "layers of rank %d", i)
		require.NoError(t, j.requests[i].Err())
		j.compare(t, i, cellOf)
	}
}

// ready drains the layers of one receiver and sorts them.
func (j *job) ready(t testing.TB, i int) (layers []int) {
	t.Helper()
	over := time.After(limit)
	for {
		select {
		case l, open := <-j.requests[i].Ready():
			if !open {
				slices.Sort(layers)
				return layers
			}
			layers = append(layers, l)
		case <-over:
			require.Fail(t, "a request does not end")
		}
	}
}

// nothing is the content of a cell that no byte has come to.
func nothing(uint64, *layout.View, int, uint64) []byte { return nil }

// compare compares the memory of one receiver with the naive reshape.
func (j *job) compare(t testing.TB, i int,
	content func(request uint64, v *layout.View, unit int, token uint64) []byte) {
	t.Helper()
	m := j.c.to[i]
	want := &member{side: m.side}
	for k, r := range m.regions {
		if r != nil {
			copyOf, err := m.eng.RegisterPrivate(fmt.Sprintf("want %d", k),
				engine.HostSegment(j.before[i][k]))
			require.NoError(t, err)
			defer copyOf.Close()
			r = copyOf
		}
		want.regions = append(want.regions, r)
	}
	for _, l := range layersOf(m.side) {
		patterns, err := j.c.plan.Tail(nil, i, l, j.to[i], j.span)
		require.NoError(t, err)
		for k := range patterns {
			p := &patterns[k]
			for _, d := range p.AppendDescs(nil, 0) {
				clear(want.regions[p.LocalKey].Bytes()[d.Local : d.Local+d.Len])
			}
		}
	}
	want.each(j.to[i], j.span, func(v *layout.View, unit int, token uint64, cell []byte) {
		copy(cell, content(j.number, v, unit, token))
	})
	for k, r := range m.regions {
		if r == nil || bytes.Equal(want.regions[k].Bytes(), bytesOf(r)) {
			continue
		}
		for at, b := range bytesOf(r) {
			require.Equal(t, want.regions[k].Bytes()[at], b, "rank %d, region %d, byte %d", i, k,
				at)
		}
	}
}

// sidesOf lays out all ranks of a spec.
func sidesOf(t testing.TB, spec layout.Spec, p layout.Placement) (sides []*layout.Side) {
	t.Helper()
	for r := range max(1, p.TP) {
		p.Rank = r
		if p.Blocks == 0 {
			p.Blocks = 64
		}
		s, err := layout.NewSide(spec, p)
		require.NoError(t, err)
		sides = append(sides, s)
	}
	return sides
}

// grouped is grouped-query attention of some layers.
func grouped(layers, heads int, head uint64) layout.Spec {
	var list []int
	for l := range layers {
		list = append(list, l)
	}
	return layout.Spec{Name: "gqa", Tensors: []layout.Tensors{{Layers: list,
		Parts: []layout.Cells{{Name: "k", DType: "bf16", Units: heads, Bytes: head},
			{Name: "v", DType: "bf16", Units: heads, Bytes: head}}}}}
}
