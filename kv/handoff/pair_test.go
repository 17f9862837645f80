// SPDX-License-Identifier: Apache-2.0

package handoff

import (
	"bytes"
	"context"
	"encoding/binary"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/sluicehq/sluice/backends/fault"
	"github.com/sluicehq/sluice/backends/mem"
	"github.com/sluicehq/sluice/backends/shm"
	"github.com/sluicehq/sluice/driver"
	"github.com/sluicehq/sluice/engine"
	"github.com/sluicehq/sluice/internal/testing/testkit"
	"github.com/sluicehq/sluice/kv/layout"
	"github.com/sluicehq/sluice/kv/pool"
)

// limit bounds every wait of these tests.
const limit = 20 * time.Second

func within(t testing.TB) context.Context {
	t.Helper()
	ctx, cancel := context.WithTimeout(context.Background(), limit)
	t.Cleanup(cancel)
	return ctx
}

// small is a model whose blocks are no whole pages: 5 layers of 16 tokens of 44
// bytes are 3,520.
var small = layout.Model{Name: "small", Layers: 5,
	Parts: []layout.Part{{Name: "latent", TokenBytes: 36}, {Name: "indexer", TokenBytes: 8}}}

// large has layers that a backend copies by workers: 4 of 256 KiB in a block.
var large = layout.Model{Name: "large", Layers: 4,
	Parts: []layout.Part{{Name: "k", TokenBytes: 8192, Heads: 8}, {Name: "v", TokenBytes: 8192,
		Heads: 8}}}

// side is one of the two engines with its pool.
type side struct {
	eng      *engine.Engine
	mux      *Mux
	region   *engine.Region
	geometry *layout.Geometry
	peer     *engine.Peer // the other side
}

// pair is a prefill and a decode side in one process.
type pair struct {
	prefill, decode side
	pool            *pool.Pool
	sender          *Sender
	receiver        *Receiver
	filling         sync.Mutex
	filled          map[uint32]uint64 // what the prefill side's blocks hold: number to hash
}

// setup says how a pair differs from the ordinary one.
type setup struct {
	model    layout.Model
	order    layout.Arrangement // of the prefill side
	blocks   int                // of the decode side
	backend  func(testing.TB) driver.Backend
	engine   func(*engine.Config)
	sender   func(*SenderConfig)
	receiver func(*ReceiverConfig)
}

// poison fills the decode side's pool before the first request.
const poison = 0xEE

// prefillBlocks is the pool of every prefill side.
const prefillBlocks = 32

func newPair(t testing.TB, s setup) *pair {
	t.Helper()
	testkit.CheckLeaks(t)
	if s.model.Layers == 0 {
		s.model = small
	}
	if s.blocks == 0 {
		s.blocks = 16
	}
	if s.backend == nil {
		s.backend = newMem
	}
	p := &pair{
		prefill: newSide(t, "prefill", s, layout.Options{Blocks: prefillBlocks,
			Arrangement: s.order}),
		decode: newSide(t, "decode", s, layout.Options{Blocks: uint64(s.blocks)}),
		filled: map[uint32]uint64{},
	}
	copy(p.decode.region.Bytes(), bytes.Repeat([]byte{poison}, int(p.decode.region.Size())))
	p.prefill.peer = connect(t, p.prefill.eng, p.decode.eng)
	p.decode.peer = connect(t, p.decode.eng, p.prefill.eng)
	var err error
	p.pool, err = pool.New(s.blocks)
	require.NoError(t, err)
	p.open(t, s)
	return p
}

// open makes sender and receiver, and has them close before the engines.
func (p *pair) open(t testing.TB, s setup) {
	t.Helper()
	sc := SenderConfig{Region: p.prefill.region, Geometry: p.prefill.geometry}
	rc := ReceiverConfig{Region: p.decode.region, Geometry: p.decode.geometry, Pool: p.pool}
	if s.sender != nil {
		s.sender(&sc)
	}
	if s.receiver != nil {
		s.receiver(&rc)
	}
	var err error
	p.sender, err = NewSender(p.prefill.mux, sc)
	require.NoError(t, err)
	p.receiver, err = NewReceiver(p.decode.mux, rc)
	require.NoError(t, err)
	t.Cleanup(func() {
		if err := p.sender.Close(); err != nil {
			t.Errorf("close sender: %v", err)
		}
		p.receiver.Close()
		if s := p.pool.Stats(); s.Used != 0 || s.Retired != 0 || s.Waiting != 0 {
			t.Errorf("blocks leaked: %+v", s)
		}
	})
}

func newSide(t testing.TB, name string, s setup, o layout.Options) side {
	t.Helper()
	g, err := layout.New(s.model, o)
	require.NoError(t, err)
	cfg := engine.Config{Name: name, Backends: []driver.Backend{s.backend(t)}, Spin: testkit.Spin()}
	if s.engine != nil {
		s.engine(&cfg)
	}
	eng, err := engine.Open(cfg)
	require.NoError(t, err)
	b, err := eng.Alloc(g.PoolBytes(), engine.AllocOptions{Purpose: "kv"})
	require.NoError(t, err)
	region, err := eng.Register("kv", b.Segment())
	require.NoError(t, err)
	mux := NewMux(eng)
	t.Cleanup(func() {
		mux.Close()
		if err := eng.Close(); err != nil {
			t.Errorf("close engine %s: %v", name, err)
		}
		_ = b.Close()
	})
	return side{eng: eng, mux: mux, region: region, geometry: g}
}

func connect(t testing.TB, from, to *engine.Engine) *engine.Peer {
	t.Helper()
	d, err := to.Describe()
	require.NoError(t, err)
	p, err := from.Connect(within(t), d)
	require.NoError(t, err)
	return p
}

// request makes the blocks of a request, with their content in place: block i of
// the prefill side holds what hash ids[i] stands for.
func (p *pair) request(t testing.TB, ids ...uint64) []Block {
	t.Helper()
	p.filling.Lock()
	defer p.filling.Unlock()
	blocks := make([]Block, len(ids))
	for i, id := range ids {
		blocks[i] = Block{Hash: pool.HashOf(id), Local: uint32(i)}
		if held, ok := p.filled[uint32(i)]; ok && held == id {
			continue
		}
		p.filled[uint32(i)] = id
		p.prefill.each(t, uint32(i), func(layer, part int, b []byte) {
			copy(b, content(id, layer, part, len(b)))
		})
	}
	return blocks
}

// each calls f with every piece of a block.
func (s *side) each(t testing.TB, block uint32, f func(layer, part int, b []byte)) {
	t.Helper()
	for layer := range s.geometry.Layers() {
		s.layer(t, block, layer, func(part int, b []byte) { f(layer, part, b) })
	}
}

func (s *side) layer(t testing.TB, block uint32, layer int, f func(part int, b []byte)) {
	t.Helper()
	for part := range s.geometry.Parts() {
		r, err := s.geometry.Piece(uint64(block), layer, part)
		require.NoError(t, err)
		f(part, s.region.Bytes()[r.Off:r.Off+r.Len])
	}
}

// content is what a piece of the block of that hash holds.
func content(id uint64, layer, part, n int) []byte {
	b := make([]byte, 0, n+16)
	for i := uint64(0); len(b) < n; i++ {
		x := (id+1)*0x9E3779B97F4A7C15 ^ uint64(layer*64+part+
			1)*0xBF58476D1CE4E5B9 ^ i*0x94D049BB133111EB
		b = binary.LittleEndian.AppendUint64(b, x^x>>29)
	}
	return b[:n]
}

// checkLayer compares a layer of all blocks of a request, byte by byte.
func (p *pair) checkLayer(t testing.TB, q *Request, layer int, ids []uint64) {
	t.Helper()
	for i, block := range q.Blocks {
		p.decode.layer(t, block, layer, func(part int, b []byte) {
			if !bytes.Equal(b, content(ids[i], layer, part, len(b))) {
				t.Errorf("request %d: block %d (hash %d), layer %d, part %d differs", q.ID, block,
					ids[i], layer, part)
			}
		})
	}
}

// begin starts a request and accepts it on the other side.
func (p *pair) begin(t testing.TB, number uint64, ids ...uint64) (*Push, *Request) {
	t.Helper()
	push, err := p.sender.Begin(within(t), p.prefill.peer, number, p.request(t, ids...))
	require.NoError(t, err)
	q, err := p.receiver.Accept(within(t))
	require.NoError(t, err)
	if q.ID != number || len(q.Blocks) != len(ids) {
		t.Fatalf("accepted request %d of %d blocks, want %d of %d", q.ID, len(q.Blocks), number,
			len(ids))
	}
	return push, q
}

// handOver takes a request all the way and checks every byte.
func (p *pair) handOver(t testing.TB, number uint64, ids ...uint64) *Request {
	t.Helper()
	push, q := p.begin(t, number, ids...)
	pushed := make(chan struct{})
	go func() {
		defer close(pushed)
		for layer := range p.prefill.geometry.Layers() {
			if err := push.Layer(within(t), layer); err != nil {
				t.Errorf("push layer %d: %v", layer, err)
			}
		}
		if err := push.Finish(within(t)); err != nil {
			t.Errorf("finish: %v", err)
		}
	}()
	layers := 0
	for layer := range q.Ready() {
		p.checkLayer(t, q, layer, ids)
		layers++
	}
	if q.Err() != nil || layers != p.decode.geometry.Layers() {
		t.Fatalf("request %d: %d layers, then %v", number, layers, q.Err())
	}
	<-pushed
	for layer := range layers {
		p.checkLayer(t, q, layer, ids)
	}
	return q
}

// over runs a test with each backend that the two sides may have in common, mem in virtual time.
func over(t *testing.T, test func(t *testing.T, open func(testing.TB) driver.Backend)) {
	testkit.RunInVirtualTime(t, "mem", func(t *testing.T) { test(t, newMem) })
	t.Run("shm", func(t *testing.T) { test(t, newShm) })
}

func newMem(t testing.TB) driver.Backend {
	t.Helper()
	b, err := mem.New(mem.Config{})
	require.NoError(t, err)
	return b
}

// newSlowMem is mem whose transfers take up to a millisecond, so that in virtual time some are met
// in flight.
func newSlowMem(t testing.TB) driver.Backend {
	t.Helper()
	late := fault.Late(500*time.Microsecond, 500*time.Microsecond)
	b, err := fault.Wrap(newMem(t), 0, fault.Rule{On: fault.Write, Chance: 0.7, Do: late},
		fault.Rule{On: fault.Read, Chance: 0.7, Do: late})
	require.NoError(t, err)
	return b
}

func newShm(t testing.TB) driver.Backend {
	t.Helper()
	b, err := shm.New(shm.Config{})
	require.NoError(t, err)
	return b
}
