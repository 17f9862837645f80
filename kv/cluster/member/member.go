// SPDX-License-Identifier: Apache-2.0

// Package member makes the server of a cache a node of a cluster (kv/cluster), which clients find
// by themselves: what nodes do among each other is that copies go where placement says.
//
// It hears of each Load and Store of the clients (serve.Member), and so knows the segments that the
// node has blocks of, and which of them are read. It sends blocks to other nodes, as a client of
// theirs and of its own server: through a buffer, a few blocks at a time, at a bounded rate, and as
// engine.Replicate, so that no swap-in waits for them.
//
//	member.go   the goroutine that knows: what clients use, the list of nodes, and each tick
//	segments.go what the node has, by segment, and which of it is surplus
//	told.go     the digests, for those who wait for them
//	send.go     the goroutines that send
//
// What is sent, and when: once the list of nodes has changed, what has a new owner
// (placement.Plan); at a tick, segments that are read so much that they get further owners
// (placement.Heat). They are announced when the copies are there.
//
// What it knows begins with its process: blocks that the cache has had before are sent once a
// client has used them.
package member

import (
	"cmp"
	"context"
	"fmt"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"github.com/sluicehq/sluice/engine"
	"github.com/sluicehq/sluice/identity"
	"github.com/sluicehq/sluice/kv/cache"
	"github.com/sluicehq/sluice/kv/cache/serve"
	"github.com/sluicehq/sluice/kv/cluster"
	"github.com/sluicehq/sluice/kv/cluster/placement"
	"github.com/sluicehq/sluice/kv/directory"
)

// Config is what New needs.
type Config struct {
	Name  string // of the node in the directory
	Cache *cache.Cache

	// BytesASecond bounds what the node sends, and what it is sent by all others together. Default
	// 128 MiB.
	BytesASecond uint64

	// Tick is how often it looks at what is read. Default placement.TickInterval, and the same at
	// all nodes.
	Tick time.Duration
}

// Member is a node. It is the Member of a serve.Config.
type Member struct {
	cfg    Config
	id     uint64
	uses   chan *serve.Use
	keys   atomic.Int64  // of those
	unseen atomic.Uint64 // uses for which there was no room
	do     chan func()   // in the goroutine of run
	told   told
	plan   queue // to those who own it now
	hot    queue // to further owners

	sent, bytes, failed atomic.Uint64
	counts              atomic.Pointer[serve.Copies] // of the last survey

	// What follows is of the goroutine of run alone.
	cluster    *cluster.Cluster
	segments   map[placement.Key]*segment
	blocks     int // of all segments
	heat       *placement.Heat
	names      map[uint64]string // of nodes
	nodes      []placement.Node
	before     []placement.Node // who has the segments that are still to be sent
	again      bool             // some of these were not
	namespaces map[string]directory.Namespace
	waits      map[placement.Key]int // further owners to which a segment is still to be sent
	announced  map[placement.Key]uint16
	ticks      int
}

// What waits to be counted is bounded: calls of clients, and their keys.
const (
	usesMax = 1 << 12
	keysMax = 1 << 20
)

// New makes a node, which counts what clients use, and joins nothing yet.
func New(cfg Config) (*Member, error) {
	if cfg.Cache == nil || cfg.Name == "" || cfg.Tick < 0 {
		return nil, fmt.Errorf("member: want a cache, a name, and a tick that is not negative: %w",
			engine.ErrBounds)
	}
	cfg.Tick = cmp.Or(cfg.Tick, placement.TickInterval)
	cfg.BytesASecond = cmp.Or(cfg.BytesASecond, 128<<20)
	m := &Member{cfg: cfg, id: cluster.NodeID(cfg.Name), uses: make(chan *serve.Use, usesMax),
		do: make(chan func()), segments: map[placement.Key]*segment{}, heat: placement.NewHeat(),
		waits: map[placement.Key]int{}, announced: map[placement.Key]uint16{}}
	m.plan.wake, m.hot.wake = make(chan struct{}, 1), make(chan struct{}, 1)
	m.counts.Store(&serve.Copies{})
	m.told.open(m.id, uint64(time.Now().UnixNano()))
	return m, nil
}

// Used implements serve.Member.
func (m *Member) Used(u *serve.Use) {
	if u.Copy && !u.Store { // its own, to send it
		return
	}
	n := int64(len(u.Keys))
	if m.keys.Add(n) <= keysMax {
		select {
		case m.uses <- u:
			return
		default:
		}
	}
	m.keys.Add(-n)
	m.unseen.Add(1)
}

// Digest implements serve.Member.
func (m *Member) Digest(ctx context.Context, since []byte) (digest, next []byte, err error) {
	return m.told.await(ctx, since)
}

// Report implements serve.Member.
func (m *Member) Report() serve.Copies {
	r := *m.counts.Load()
	r.Pending += m.plan.pending() + m.hot.pending()
	r.Sent, r.Bytes, r.Failed = m.sent.Load(), m.bytes.Load(), m.failed.Load()
	r.Unseen, r.Rate = m.unseen.Load(), m.cfg.BytesASecond
	return r
}

// Net is how a node reaches the others.
type Net struct {
	Engine    *engine.Engine // for this alone, of another name than the server's
	Directory directory.Directory
	Identity  *identity.Identity // see cluster.Config
}

// openLimit is how long Run waits for nodes that do not answer before it begins without them.
const openLimit = time.Second

// closeLimit is how long it waits for the proof that no node reaches its buffers any more.
const closeLimit = 10 * time.Second

// Run is the story of a node, until ctx ends. With an error nodes may still reach the buffers.
func (m *Member) Run(ctx context.Context, net Net) error {
	soon, cancel := context.WithTimeout(ctx, openLimit)
	c, err := cluster.Open(soon, cluster.Config{Engine: net.Engine, Directory: net.Directory,
		Identity: net.Identity, Node: m.cfg.Name})
	cancel()
	if err != nil {
		return fmt.Errorf("member: %w", err)
	}
	m.cluster = c
	ctx, stop := context.WithCancel(ctx)
	var senders sync.WaitGroup
	for name, q := range map[string]*queue{"moves": &m.plan, "copies": &m.hot} {
		s := &sender{m: m, name: name, e: net.Engine, spaces: map[[16]byte]*cluster.Space{},
			lost: map[string]int{}}
		senders.Go(func() { s.run(ctx, q) })
	}
	m.know(ctx, net.Directory)
	stop()
	senders.Wait()
	soon, cancel = context.WithTimeout(context.Background(), closeLimit)
	defer cancel()
	return c.Close(soon)
}

// know counts what clients use, follows the list of nodes, and decides at each tick.
func (m *Member) know(ctx context.Context, d directory.Directory) {
	ticks := time.NewTicker(m.cfg.Tick)
	defer ticks.Stop()
	v, changed := d.View()
	m.arrange(v)
	for {
		select {
		case <-ctx.Done():
			return
		case u := <-m.uses:
			if m.count(u); m.blocks > m.blocksMax() {
				m.survey()
				m.publish()
			}
		case f := <-m.do:
			f()
		case <-changed:
			v, changed = d.View()
			m.arrange(v)
		case <-ticks.C:
			m.tick()
		}
	}
}

// catchUp counts what waits, in the middle of long work, as far as there is room for it.
func (m *Member) catchUp() {
	for m.blocks <= m.blocksMax() {
		select {
		case u := <-m.uses:
			m.count(u)
		default:
			return
		}
	}
}

// arrange takes a view of the directory. Where the nodes have changed it plans what to send: until
// all has been sent those of the first change are the ones that have it.
func (m *Member) arrange(v *directory.View) {
	m.namespaces = v.Namespaces
	first, old := m.nodes == nil, m.nodes
	nodes, names := []placement.Node{}, map[uint64]string{}
	for _, n := range v.Nodes {
		id := cluster.NodeID(n.Name)
		nodes, names[id] = append(nodes, placement.Node{ID: id, Weight: n.Weight}), n.Name
	}
	if !first && slices.Equal(nodes, old) { // others are more or less busy
		return
	}
	m.nodes, m.names = nodes, names
	if !first {
		if m.plan.pending() == 0 && !m.again {
			m.before = old
		}
		m.hand()
	}
	m.survey()
	m.publish()
}

// hand sends what has a new owner, also of what clients had stored a moment ago.
func (m *Member) hand() {
	m.catchUp()
	m.again = false
	held := func(yield func(placement.Held) bool) {
		for head := range m.segments {
			if !yield(m.held(head)) {
				return
			}
		}
	}
	m.plan.replace(m.handover(placement.Plan(m.before, m.nodes, m.id, held)))
}

// handover paces moves at half the rate: there are two queues.
func (m *Member) handover(moves []placement.Move) (*placement.Handover, int) {
	return placement.NewHandover(moves, m.nodes, m.id, float64(m.cfg.BytesASecond)/2, since()),
		len(moves)
}

// tick decides how many owners the segments have, and what is to be sent for it.
func (m *Member) tick() {
	m.ticks++
	var moves []placement.Move
	further := func(segment placement.Key, from, to int) {
		s, owners := m.segments[segment], placement.Owners(nil, m.nodes, segment, to)
		if s == nil {
			return
		}
		s.lacking = false
		for _, owner := range owners[min(from, len(owners)):] {
			m.waits[segment]++
			moves = append(moves, placement.Move{Held: m.held(segment), To: m.nodes[owner].ID})
		}
	}
	changes := m.heat.Tick(m.nodes, m.id, m.cluster.MeanLoad(m.heat.Load()), m.cluster.Owners)
	for _, c := range changes {
		further(c.Segment, c.From, c.To)
	}
	for _, h := range m.heat.Hot() { // blocks that came since go to its further owners, too
		if s := m.segments[h.Segment]; s != nil && s.grown && m.waits[h.Segment] == 0 &&
			placement.Rank(m.nodes, m.id, h.Segment, 1) == 0 {
			further(h.Segment, 1, int(h.Owners))
		}
	}
	if len(moves) > 0 {
		m.hot.add(m.handover(moves))
	}
	if m.again && m.plan.pending() == 0 {
		m.hand()
	}
	m.survey()
	m.publish()
}

// arrived has a segment announced once it is at all of its further owners. What was not sent is
// sent again at the next tick.
func (m *Member) arrived(segment placement.Key, sent bool) {
	if s := m.segments[segment]; s != nil && !sent {
		s.grown, s.lacking = true, true
	}
	if m.waits[segment]--; m.waits[segment] > 0 {
		return
	}
	delete(m.waits, segment)
	m.publish()
}

// publish has those who wait know what has changed. A segment that is still to be sent to further
// owners, or again, has those that were announced before.
func (m *Member) publish() {
	var hot []placement.Hot
	for _, h := range m.heat.Hot() {
		s := m.segments[h.Segment]
		if m.waits[h.Segment] > 0 || s != nil && s.lacking {
			h.Owners = min(h.Owners, m.announced[h.Segment])
		}
		if h.Owners > 1 {
			hot = append(hot, h)
		}
	}
	clear(m.announced)
	for _, h := range hot {
		m.announced[h.Segment] = h.Owners
	}
	m.told.endChange(m.heat.Load(), hot)
}

// copies is how many nodes a namespace has its blocks on, whoever reads them.
func (m *Member) copies(name string) int {
	return max(1, min(m.namespaces[name].Copies, directory.CopiesMax))
}

// owners is how many owners a segment has by its heat.
func (m *Member) owners(segment placement.Key) int {
	return max(1, m.heat.Owners(segment), m.cluster.Owners(segment))
}

// survey looks at what the node has: blocks that it has although the list gives them to others it
// tells, and has go first once all is sent, also what a client has stored since, by an older list.
// It forgets what the cache has no more: of those blocks or, where it knows too many, of all.
func (m *Member) survey() {
	surplus, opened := map[placement.Key]bool{}, map[[16]byte]*cache.Namespace{}
	idle, listed := m.plan.pending() == 0, m.names[m.id] != ""
	sent := idle && !m.again
	full, n, again := m.blocks > m.blocksMax(), 0, 0
	var late []placement.Move
	for head, s := range m.segments {
		owners, beyond := m.owners(head), false
		s.parts = slices.DeleteFunc(s.parts, func(p *part) bool {
			rank := placement.Rank(m.nodes, m.id, head, max(owners, m.copies(p.of.Name)))
			if rank < 0 || full {
				m.check(p, opened)
			}
			if rank < 0 {
				beyond = true
				for _, b := range p.blocks {
					surplus[b.key] = true
				}
				if sent && !s.grown && len(p.blocks) > 0 {
					_, _ = opened[p.of.Digest].Hint(p.keys(),
						cache.Hint{Kind: cache.HintSessionEnd})
				}
			}
			return len(p.blocks) == 0
		})
		switch unsent := idle && listed && s.grown && beyond && len(s.parts) > 0; {
		case unsent && m.again:
			again++
		case unsent:
			held := m.held(head)
			for _, owner := range placement.Owners(nil, m.nodes, head, held.Owners) {
				late = append(late, placement.Move{Held: held, To: m.nodes[owner].ID})
			}
		}
		s.reads /= 2
		if len(s.parts) == 0 || full && m.blocks > m.blocksMax() && n%8 == 0 {
			m.forget(head)
		}
		if n++; n%256 == 0 {
			m.catchUp()
		}
	}
	for _, ns := range opened {
		if ns != nil {
			ns.Close()
		}
	}
	if len(late) > 0 {
		m.plan.add(m.handover(late))
	}
	m.told.have(surplus)
	m.counts.Store(&serve.Copies{Segments: len(m.segments), Blocks: m.blocks,
		Surplus: len(surplus), Hot: len(m.heat.Hot()), Pending: again})
}
