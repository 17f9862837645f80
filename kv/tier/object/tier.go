// SPDX-License-Identifier: Apache-2.0

package object

import (
	"cmp"
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"hash/crc32"
	"io/fs"
	"math"
	"math/rand/v2"
	"slices"
	"strings"
	"sync"
	"time"

	limiter "golang.org/x/time/rate"

	"github.com/sluicehq/sluice/engine"
	"github.com/sluicehq/sluice/kv/cache"
)

// Config is what Open needs.
type Config struct {
	// Bucket has the objects.
	Bucket Bucket
	// Prefix begins the names of all objects of this tier, such as "kv/node-1/". No other node may
	// have it: what lies under it is deleted once there is too much of it.
	Prefix string
	// Bytes bounds the objects; where there are more those go that were used longest ago.
	Bytes uint64
	// Blocks bounds the blocks, of which each takes some 200 bytes of memory. Default: Bytes by
	// 64 KiB, at most 4 Mi.
	Blocks int
	// PackBytes is the most of an object, without its index, and so of a block. Three times as much
	// memory is used for what is being written. Default 32 MiB, at most 64 MiB.
	PackBytes int
	// BytesASecond bounds what is written; 0: nothing does. Four seconds' bytes may come at once.
	// While less than half of them is left only blocks that were used again are written.
	BytesASecond uint64
	// TTL: objects go, with their blocks, when they were written longer ago. 0: there is no such
	// time.
	TTL time.Duration
	// Timeout is how long a request may take, and once more for each 8 MiB of it. Default 5 s.
	Timeout time.Duration
	// Seal encrypts each block; nil: they are stored as they are.
	Seal Sealer

	linger time.Duration // how long blocks may wait for others of their object
	rest   time.Duration // how long the store is left alone after failures
	// how long a tombstone stays at least: a request that was given up may write an object later
	tombAge time.Duration
}

// Sealer encrypts blocks. about is the namespace, the key and the number of the object, so that a
// block opens in its place alone.
type Sealer interface {
	Seal(dst, plain, about []byte) []byte
	Open(dst, sealed, about []byte) ([]byte, error)
}

const (
	blocksMax   = 4 << 20
	packBytes   = 32 << 20
	packMax     = 64 << 20
	sealMax     = 64 // bytes that Seal may add
	spanMax     = 8 << 20
	gapMax      = 64 << 10 // between two blocks that one request reads
	lingerFor   = time.Minute
	prefixMax   = 512
	removedMax  = 1 << 20 // blocks whose tombstones may wait for the store, and of an object
	orphanAge   = time.Hour
	uploadAge   = 24 * time.Hour
	objectsMax  = 4 << 20  // that a start lists
	tombsMax    = 64 << 10 // older than tombAge: for more of them the oldest packs go
	packSuffix  = ".pack"
	tombSuffix  = ".gone"
	listTimeout = 160 << 20 // of a list, as bytes of another request: 21 timeouts
)

// Check says what Open would refuse.
func (c Config) Check() error { return c.complete() }

func (c *Config) complete() error {
	c.PackBytes = cmp.Or(c.PackBytes, packBytes)
	c.Timeout = cmp.Or(c.Timeout, 5*time.Second)
	c.linger = cmp.Or(c.linger, lingerFor)
	c.rest = cmp.Or(c.rest, restOfAStore)
	c.tombAge = cmp.Or(c.tombAge, orphanAge)
	c.Blocks = cmp.Or(c.Blocks, int(min(max(c.Bytes>>16, 1), blocksMax)))
	for _, n := range []struct {
		what           string
		n, least, most uint64
	}{
		{"PackBytes", uint64(c.PackBytes), 4 << 10, packMax},
		{"Bytes", c.Bytes, 2 * uint64(c.PackBytes), math.MaxInt64},
		{"Blocks", uint64(c.Blocks), 1, 1 << 30},
		{"Timeout", uint64(c.Timeout), 1e6, uint64(time.Hour)},
		{"TTL", uint64(c.TTL), 0, math.MaxInt64},
	} {
		if n.n < n.least || n.n > n.most {
			return fmt.Errorf("object tier: %s %d: from %d to %d: %w", n.what, n.n, n.least, n.most,
				engine.ErrBounds)
		}
	}
	if c.Prefix == "" || len(c.Prefix) > prefixMax || strings.HasPrefix(c.Prefix, "/") {
		return fmt.Errorf("object tier: Prefix %q: want one of up to %d bytes that does not begin "+
			"with /: %w", c.Prefix, prefixMax, engine.ErrBounds)
	}
	return nil
}

// Tier implements cache.Below.
type Tier struct {
	cfg      Config
	requests *requests
	limit    *limiter.Limiter // nil: nothing bounds what is written
	life     context.Context  // of the goroutine that writes and collects
	stop     context.CancelCauseFunc
	ended    chan struct{}
	wake     chan struct{}

	packing sync.Mutex // taken before mu; of what is appended to open
	open    *pack      // takes blocks; nil: none
	spare   []byte     // for the next one
	closed  bool

	mu      sync.RWMutex // not held across a request
	ready   bool         // the indexes of the store have been read
	listed  bool         // number is that of the last object in the store, at least
	early   []blockID    // removed before the tier was ready
	unsure  uint64       // packs of lower numbers may have blocks that were removed
	blocks  map[blockID]entry
	waiting map[blockID]*pack // blocks of packs that are not written yet
	packs   []*pack           // that the store has
	sending *pack             // is full, and being written
	sent    chan struct{}     // closed and made anew when there is no sending any more
	number  uint64            // of the last object
	hiding  int               // packs that hide
	bytes   uint64            // of packs
	tombs   []uint64          // numbers of tombstones in the store
	names   map[uint64]string // of those
	removed []record          // have no tombstone yet; behind them others are appended
	tombing chan struct{}     // has one while a tombstone is written
	overrun bool              // too many of those: the tier is not used until the next process
	doomed  []string          // objects to delete
	swept   time.Time         // when uploads were looked for last
	stats   cache.BelowStats
}

// entry says where a block is.
type entry struct {
	pack *pack
	place
}

// pack is an object, or what is to become one.
type pack struct {
	name    string
	number  uint64
	size    int64
	written int64 // second of the wall clock
	used    time.Time
	ids     []blockID // some of which may be gone
	live    int
	hides   bool // has a block that was not removed, and is not found

	p       []byte // until it is written
	records []record
	began   time.Time
	tried   bool // to write it
}

// Open returns at once. What the store has is found once its indexes have been read.
func Open(cfg Config) (*Tier, error) {
	if err := cfg.complete(); err != nil {
		return nil, err
	}
	t := &Tier{cfg: cfg, requests: newRequests(cfg.Bucket, cfg.Timeout, cfg.rest),
		ended: make(chan struct{}), wake: make(chan struct{}, 1), sent: make(chan struct{}),
		tombing: make(chan struct{}, 1), blocks: map[blockID]entry{},
		waiting: map[blockID]*pack{}, names: map[uint64]string{}}
	if n := cfg.BytesASecond; n > 0 {
		burst := int(min(max(4*n, uint64(2*cfg.PackBytes)), math.MaxInt64))
		t.limit = limiter.NewLimiter(limiter.Limit(n), burst)
	}
	t.life, t.stop = context.WithCancelCause(context.Background())
	go t.run()
	return t, nil
}

// Close writes what has been taken, as far as ctx allows, and ends the tier.
func (t *Tier) Close(ctx context.Context) error {
	t.stop(engine.ErrClosed)
	<-t.ended
	t.packing.Lock()
	t.closed = true
	t.packing.Unlock()
	var err error
	for range 2 { // what is being written, and what is open
		err = errors.Join(err, t.send(ctx))
		t.packing.Lock()
		t.rotate()
		t.packing.Unlock()
	}
	if err = errors.Join(err, t.send(ctx)); err != nil {
		return fmt.Errorf("close object tier: %w", err)
	}
	return nil
}

// unused says why the tier finds and takes nothing now. The caller holds mu.
func (t *Tier) unused() error {
	switch err := t.requests.unused(); {
	case t.overrun:
		return fmt.Errorf("more than %d blocks were removed while the store was not there: "+
			"restart the cache", removedMax)
	case err != nil:
		return err
	case !t.ready:
		return errors.New("the indexes of the store are being read")
	}
	return nil
}

// Find implements cache.Below.
func (t *Tier) Find(space [16]byte, keys []cache.Key) []cache.BelowBlock {
	found, now := make([]cache.BelowBlock, len(keys)), time.Now().Unix()
	t.mu.RLock()
	defer t.mu.RUnlock()
	if t.unused() != nil {
		return found
	}
	for k := range keys {
		if e, ok := t.blocks[blockID{space, keys[k]}]; ok && !t.expired(e.pack, now) {
			found[k] = e.BelowBlock
		}
	}
	return found
}

func (t *Tier) expired(p *pack, now int64) bool {
	return t.cfg.TTL > 0 && now-p.written > int64(t.cfg.TTL/time.Second)
}

// Wants implements cache.Below.
func (t *Tier) Wants(space [16]byte, key cache.Key, size uint32, again bool) bool {
	t.mu.Lock()
	defer t.mu.Unlock()
	id := blockID{space, key}
	if _, has := t.blocks[id]; has || t.waiting[id] != nil || t.unused() != nil ||
		int(size)+sealMax > t.cfg.PackBytes {
		return false
	}
	now := time.Now()
	if t.limit != nil && (!again && t.limit.TokensAt(now) < float64(t.limit.Burst()/2) ||
		!t.limit.AllowN(now, int(size))) {
		t.stats.Refused++
		return false
	}
	return true
}

// about is what a block is sealed for.
func (p *pack) about(id *blockID) []byte {
	b := append(append(make([]byte, 0, 40), id.space[:]...), id.key[:]...)
	return binary.LittleEndian.AppendUint64(b, p.number)
}

// Write implements cache.Below.
func (t *Tier) Write(ctx context.Context, space [16]byte, key cache.Key, b cache.BelowBlock,
	bytes []byte) error {
	id := blockID{space, key}
	if len(bytes)+sealMax > t.cfg.PackBytes {
		return fmt.Errorf("object tier: a block of %d bytes for objects of %d: %w", len(bytes),
			t.cfg.PackBytes, engine.ErrBounds)
	}
	for {
		t.packing.Lock()
		if t.closed {
			t.packing.Unlock()
			return fmt.Errorf("object tier: %w", engine.ErrClosed)
		}
		if t.open == nil {
			t.open = t.newPack()
		}
		if len(t.open.p)+len(bytes)+sealMax <= t.cfg.PackBytes &&
			len(t.open.records) < removedMax {
			break
		}
		sent := t.rotate()
		t.packing.Unlock()
		if sent == nil {
			continue
		}
		select {
		case <-sent:
		case <-ctx.Done():
			return fmt.Errorf("wait for the store: %w", context.Cause(ctx))
		case <-t.life.Done():
			return fmt.Errorf("object tier: %w", engine.ErrClosed)
		}
	}
	defer t.packing.Unlock()
	p := t.open
	t.mu.Lock()
	has := t.waiting[id] != nil
	t.mu.Unlock()
	if has {
		return nil
	}
	at := len(p.p)
	if t.cfg.Seal != nil {
		p.p = t.cfg.Seal.Seal(p.p, bytes, p.about(&id))
	} else {
		p.p = append(p.p, bytes...)
	}
	p.records = append(p.records, record{id, place{b, uint32(at), uint32(len(p.p) - at)}})
	t.mu.Lock()
	defer t.mu.Unlock()
	t.waiting[id] = p
	return nil
}

// newPack begins a pack. The caller holds packing.
func (t *Tier) newPack() *pack {
	t.mu.Lock()
	defer t.mu.Unlock()
	p := &pack{p: t.spare, began: time.Now()}
	t.spare = nil
	if p.p == nil {
		p.p = make([]byte, 0, t.cfg.PackBytes+footerBytes)
	}
	p.number, p.name = t.nextName(packSuffix)
	return p
}

// nextName returns the number and the name of the next object. Numbers only grow, also where the
// clock does not. The caller holds mu.
func (t *Tier) nextName(suffix string) (uint64, string) {
	t.number = max(t.number+1, uint64(time.Now().UnixNano()))
	return t.number, fmt.Sprintf("%s%016x-%08x%s", t.cfg.Prefix, t.number, rand.Uint32(), suffix)
}

// rotate has the open pack written. Where another one is, it returns what is closed as that ends.
// The caller holds packing.
func (t *Tier) rotate() (sent <-chan struct{}) {
	t.mu.Lock()
	defer t.mu.Unlock()
	if t.sending != nil {
		return t.sent
	}
	if t.open != nil {
		t.sending, t.open = t.open, nil
		select {
		case t.wake <- struct{}{}:
		default:
		}
	}
	return nil
}

// send is the story of what is written: the pack that is full, whose blocks are found from then on.
// One that cannot be written stays for the next try.
func (t *Tier) send(ctx context.Context) error {
	t.mu.Lock()
	p := t.sending
	if p == nil {
		t.mu.Unlock()
		return nil
	}
	var records []record // without those that were removed meanwhile
	for _, r := range p.records {
		if t.waiting[r.blockID] == p {
			records = append(records, r)
		}
	}
	t.mu.Unlock()
	if len(records) > 0 {
		p.written = time.Now().Unix()
		body := finish(p.p, records, p.number, p.written)
		p.size = int64(len(body))
		if err := t.collect(ctx, uint64(p.size)); err != nil {
			return err
		}
		p.tried = true
		err := t.requests.do(ctx, "write "+p.name, len(body), func(ctx context.Context) error {
			return t.requests.Put(ctx, p.name, body)
		})
		if err != nil {
			return err
		}
	}
	t.mu.Lock()
	defer t.mu.Unlock()
	p.used = time.Now()
	for _, r := range records {
		if t.waiting[r.blockID] == p { // else it was removed, and a tombstone says so
			delete(t.waiting, r.blockID)
			t.add(p, &r)
			t.stats.Written++
		}
	}
	if len(records) > 0 {
		t.packs = append(t.packs, p)
		t.bytes += uint64(p.size)
	} else if p.tried {
		t.doomed = append(t.doomed, p.name)
	}
	t.spare, p.p, p.records, t.sending = p.p[:0], nil, nil, nil
	close(t.sent)
	t.sent = make(chan struct{})
	return nil
}

// add has a block of a pack be found. The caller holds mu.
func (t *Tier) add(p *pack, r *record) {
	if e, ok := t.blocks[r.blockID]; ok {
		if e.pack.number > p.number {
			return
		}
		e.pack.live--
	}
	t.blocks[r.blockID] = entry{p, r.place}
	p.ids = append(p.ids, r.blockID)
	p.live++
}

// forget has a block be found no more, if it is still where it was. The caller holds mu.
func (t *Tier) forget(id blockID, e entry) {
	if t.blocks[id] == e {
		delete(t.blocks, id)
		e.pack.live--
	}
}

// hide notes that a pack has a block that was not removed, and is not found. The caller holds mu.
func (t *Tier) hide(p *pack) {
	if !p.hides {
		p.hides = true
		t.hiding++
	}
}

// span is blocks of a pack that one request reads.
type span struct {
	pack        *pack
	begin, end  uint32
	which       []int // numbers of the keys
	into, owned [][]byte
}

// Read implements cache.Below. Blocks that lie beside each other come by one request, and several
// requests run at a time. It ends after twice the timeout, with what has come by then.
func (t *Tier) Read(ctx context.Context, space [16]byte, keys []cache.Key, into [][]byte) []bool {
	there := make([]bool, len(keys))
	ctx, cancel := context.WithTimeoutCause(ctx, 2*t.cfg.Timeout,
		fmt.Errorf("blocks of the object tier have not come for %v", 2*t.cfg.Timeout))
	defer cancel()
	at, order := make([]entry, len(keys)), []int(nil)
	t.mu.RLock()
	if t.unused() == nil {
		for k := range keys {
			e, ok := t.blocks[blockID{space, keys[k]}]
			if at[k] = e; ok && int(e.Size) == len(into[k]) {
				order = append(order, k)
			}
		}
	}
	t.mu.RUnlock()
	slices.SortFunc(order, func(a, b int) int {
		return cmp.Or(cmp.Compare(at[a].pack.number, at[b].pack.number),
			cmp.Compare(at[a].offset, at[b].offset))
	})
	var spans []*span
	var s *span
	for _, k := range order {
		e := &at[k]
		if s == nil || s.pack != e.pack || e.offset < s.end || e.offset-s.end > gapMax ||
			e.offset+e.stored-s.begin > spanMax {
			s = &span{pack: e.pack, begin: e.offset, end: e.offset}
			spans = append(spans, s)
		}
		if gap := e.offset - s.end; gap > 0 {
			s.into = append(s.into, make([]byte, gap))
		}
		s.which, s.end = append(s.which, k), e.offset+e.stored
		if p := into[k]; t.cfg.Seal == nil {
			s.into = append(s.into, p)
		} else {
			p = make([]byte, e.stored)
			s.into, s.owned = append(s.into, p), append(s.owned, p)
		}
	}
	var all sync.WaitGroup
	for _, s := range spans {
		all.Go(func() {
			err := t.requests.do(ctx, "read "+s.pack.name, int(s.end-s.begin),
				func(ctx context.Context) error {
					return t.requests.Get(ctx, s.pack.name, "", int64(s.begin), s.into)
				})
			good := make([]bool, len(s.which))
			for j, k := range s.which {
				if err != nil {
					break
				}
				if t.cfg.Seal != nil {
					id := blockID{space, keys[k]}
					p, err := t.cfg.Seal.Open(s.owned[j][:0], s.owned[j], s.pack.about(&id))
					if err != nil || len(p) != len(into[k]) {
						continue
					}
					copy(into[k], p)
				}
				good[j] = crc32.Checksum(into[k], castagnoli) == at[k].CRC
			}
			t.mu.Lock()
			defer t.mu.Unlock()
			s.pack.used = time.Now()
			if errors.Is(err, fs.ErrNotExist) {
				t.stats.Lost += uint64(s.pack.live)
				t.forgetPacks(func(p *pack) bool { return p == s.pack })
			}
			for j, k := range s.which {
				id := blockID{space, keys[k]}
				switch {
				case good[j] && t.blocks[id] == at[k]: // it was not removed meanwhile
					there[k] = true
					t.stats.Read++
				case err == nil && !good[j]:
					t.stats.Damaged++
					if t.blocks[id] == at[k] {
						t.forget(id, at[k])
						t.hide(s.pack)
					}
				}
			}
		})
	}
	all.Wait()
	return there
}

// Remove implements cache.Below.
func (t *Tier) Remove(ctx context.Context, space [16]byte, keys []cache.Key) error {
	t.mu.Lock()
	before := len(t.removed)
	hidden := !t.ready || t.hiding > 0 || len(t.doomed) > 0 // a restart may find more than is known
	for k := range keys {
		id := blockID{space, keys[k]}
		e, known := t.blocks[id]
		if known {
			t.forget(id, e)
		}
		p := t.waiting[id]
		delete(t.waiting, id)
		if known || p != nil && p == t.sending || hidden {
			t.removed = append(t.removed, record{blockID: id})
		}
		if !t.ready && !t.overrun {
			t.early = append(t.early, id)
		}
	}
	n := len(t.removed) - before
	if len(t.removed) > removedMax || len(t.early) > removedMax {
		t.removed, t.early, t.overrun = t.removed[:before], nil, true
	}
	t.mu.Unlock()
	if n == 0 {
		return nil
	}
	if err := t.entomb(ctx); err != nil {
		return fmt.Errorf("a restart may find %d blocks in the store: %w", n, err)
	}
	return nil
}

// entomb writes a tombstone for all blocks that have none, unless another call has meanwhile.
func (t *Tier) entomb(ctx context.Context) error {
	select {
	case t.tombing <- struct{}{}:
		defer func() { <-t.tombing }()
	case <-ctx.Done():
		return fmt.Errorf("wait for an earlier one: %w", context.Cause(ctx))
	}
	t.mu.Lock()
	records := slices.Clone(t.removed)
	err := t.unused()
	if t.listed && !t.ready && !t.overrun { // its number is that of a later object already
		err = t.requests.unused()
	}
	number, name := t.nextName(tombSuffix)
	owes := len(records) > 0 || t.overrun
	t.mu.Unlock()
	if !owes {
		return nil
	}
	if err != nil {
		return err
	}
	body := finish(nil, records, number, time.Now().Unix())
	err = t.requests.do(ctx, "write "+name, len(body), func(ctx context.Context) error {
		return t.requests.Put(ctx, name, body)
	})
	if err != nil {
		return err
	}
	t.mu.Lock()
	defer t.mu.Unlock()
	t.addTomb(number, name)
	t.removed = slices.Clone(t.removed[len(records):])
	return nil
}

// Stats implements cache.Below.
func (t *Tier) Stats() cache.BelowStats {
	t.mu.RLock()
	defer t.mu.RUnlock()
	s := t.stats
	s.Objects, s.Blocks, s.Bytes, s.Room = len(t.packs), len(t.blocks), t.bytes, t.cfg.Bytes
	if err := t.unused(); err != nil {
		s.Unused = err.Error()
	}
	t.requests.mu.Lock()
	defer t.requests.mu.Unlock()
	s.Retries = t.requests.retried
	if t.requests.last != nil {
		s.Error = t.requests.last.Error()
	}
	return s
}
