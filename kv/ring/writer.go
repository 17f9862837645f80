// SPDX-License-Identifier: Apache-2.0

package ring

import (
	"cmp"
	"container/list"
	"context"
	"crypto/rand"
	"encoding/binary"
	"errors"
	"fmt"
	"net"
	"os"
	"slices"
	"sort"
	"sync"
	"time"

	"golang.org/x/sys/unix"

	"github.com/sluicehq/sluice/csrc/digest"
	"github.com/sluicehq/sluice/driver"
	"github.com/sluicehq/sluice/internal/hostmem"
	"github.com/sluicehq/sluice/internal/session"
	"github.com/sluicehq/sluice/internal/testpoint"
)

// Config of a Writer; Path and Bytes are needed.
type Config struct {
	Path    string // of the Unix socket at which readers join
	Bytes   uint64 // for objects; taken at once, in huge pages where the kernel gives them
	Objects int    // at most so many at a time; 0: 4,096
	Readers int    // at most so many at a time, up to 64, which is 0
	Await   int    // so many readers will come: what is put before waits for them as well
	Sums    bool   // Commit takes the CRC-32C of each object, for View.Verify
	Note    []byte // that each reader is told when it joins (Reader.Note); at most 512 bytes

	// Patience is how long an object waits for the readers that it was handed out for and that have
	// not got it, where others need its room. 0: a minute.
	Patience time.Duration
	// Frozen is how long a stopped reader (SIGSTOP, a cgroup's freezer) keeps what it holds, where
	// others need its room. 0: 30 s; below: for ever.
	Frozen time.Duration
}

const placeTries = 8

// The errors of a Writer. Both say more in words.
var (
	ErrFull  = errors.New("the ring is full")
	ErrKnown = errors.New("there is an object of this key")
)

// Writer has a ring. Its methods may be called by any goroutine.
type Writer struct {
	cfg      Config
	listener net.Listener
	member   // its own reads
	table    []byte
	tableFD  int
	dataFD   int

	closing context.Context
	stop    context.CancelFunc
	working sync.WaitGroup

	mu         sync.Mutex // guards what follows
	conns      map[*net.UnixConn]bool
	seats      []*seat  // by number; nil: free
	awaited    uint64   // bits of the seats to which no reader has come yet (seat.came)
	targets    []uint32 // by row and seat: what the word's reads is, once nothing is owed
	epoch      uint64
	swept      time.Time
	changed    chan struct{} // closed, and made anew, when there may be more room
	waiting    int           // Reserves that wait
	generation uint64        // of the last object
	space      space
	empty      []uint32 // rows without an object
	objects    map[string]*object
	order      *list.List // of the committed *object: the next to go first
	removed    []*object  // held when they were removed
	touched    map[*object]bool
	stats      Stats
}

// object is one that is, or is about to be, in the ring.
type object struct {
	key        string
	row        uint32
	generation uint64
	at, length uint64
	since      time.Time     // when it was handed out last
	place      *list.Element // in the order; nil: it is not committed
}

// Stats are what a Writer has done and has.
type Stats struct {
	Objects, Readers int
	Bytes, Free      uint64 // of the ring, and what no object takes
	Puts, Handles    uint64 // objects committed, and handed out again
	Evicted          uint64
	Overdue          uint64 // of those, before all readers had got what they were to get
	Revoked          uint64 // seats of stopped readers that were taken away
}

// Open makes a ring and lets readers join. A path at which another program listens is an error.
func Open(cfg Config) (_ *Writer, err error) {
	if err := cfg.complete(); err != nil {
		return nil, fmt.Errorf("open ring: %w", err)
	}
	objects := uint64(cfg.Objects)
	w := &Writer{cfg: cfg, tableFD: -1, dataFD: -1, conns: map[*net.UnixConn]bool{},
		seats: make([]*seat, cfg.Readers), awaited: 1<<cfg.Await - 1,
		targets: make([]uint32, cfg.Objects*cfg.Readers), changed: make(chan struct{}),
		space: space{[]span{{0, cfg.Bytes}}}, objects: map[string]*object{}, order: list.New(),
		touched: map[*object]bool{}}
	defer func() {
		if err != nil {
			err = fmt.Errorf("open ring: %w", errors.Join(err, w.unmap()))
		}
	}()
	w.tableFD, w.table, err = hostmem.NewSealed("sluice-ring", tableBytes(objects), true)
	if err != nil {
		return nil, err
	}
	if w.dataFD, w.data, err = hostmem.NewSealedPool("sluice-ring", cfg.Bytes); err != nil {
		return nil, err
	}
	w.head, w.rows = asTable(w.table, objects)
	w.words, w.seat, w.sums = make([]word, objects), -1, cfg.Sums
	w.ring = w.tell
	for i := range w.rows {
		w.empty = append(w.empty, uint32(len(w.rows)-1-i))
	}
	// No generation of another ring is met again, so that its handles find nothing here.
	var seed [8]byte
	if _, err := rand.Read(seed[:]); err != nil {
		return nil, err
	}
	w.generation = binary.LittleEndian.Uint64(seed[:]) >> 1
	if w.listener, err = session.Listen("unixpacket", cfg.Path); err != nil {
		return nil, err
	}
	w.closing, w.stop = context.WithCancel(context.Background())
	w.working.Go(w.accept)
	return w, nil
}

func (c *Config) complete() error {
	c.Bytes = wholePages(c.Bytes)
	if c.Objects == 0 {
		c.Objects = 4096
	}
	if c.Readers == 0 {
		c.Readers = seatsMax
	}
	if c.Patience == 0 {
		c.Patience = time.Minute
	}
	if c.Frozen == 0 {
		c.Frozen = 30 * time.Second
	}
	switch {
	case c.Path == "" || c.Bytes == 0:
		return fmt.Errorf("name Path and Bytes: %w", driver.ErrBounds)
	case c.Objects < 0 || c.Objects > objectsMax:
		return fmt.Errorf("%d objects, a ring takes 1 to %d: %w", c.Objects, objectsMax,
			driver.ErrBounds)
	case c.Readers < 0 || c.Readers > seatsMax || c.Await < 0 || c.Await > c.Readers:
		return fmt.Errorf("%d readers, %d of them awaited; a ring takes 1 to %d, and awaits no "+
			"more than it takes: %w", c.Readers, c.Await, seatsMax, driver.ErrBounds)
	case len(c.Note) > noteMax:
		return fmt.Errorf("Note of %d bytes, at most %d: %w", len(c.Note), noteMax,
			driver.ErrBounds)
	case c.Patience < 0:
		return fmt.Errorf("Patience of %v: %w", c.Patience, driver.ErrBounds)
	}
	return nil
}

// Draft is an object that the program writes. Commit or Drop ends it; one goroutine uses it.
type Draft struct {
	w *Writer
	o *object // nil: it has ended
}

// Reserve takes room for an object of n bytes under a key. Where the ring is full, objects go that
// nobody holds or waits for; without such Reserve waits until readers let go, or until ctx is over.
// Then, at once if ctx was over before, it is ErrFull. A key that is known is ErrKnown, more bytes
// than the ring has are driver.ErrBounds.
func (w *Writer) Reserve(ctx context.Context, key string, n int) (*Draft, error) {
	if n < 0 || uint64(n) > w.cfg.Bytes {
		return nil, fmt.Errorf("reserve %d bytes, the ring has %d: raise Config.Bytes: %w", n,
			w.cfg.Bytes, driver.ErrBounds)
	}
	w.mu.Lock()
	defer w.mu.Unlock()
	for {
		if w.closing.Err() != nil {
			return nil, driver.ErrClosed
		}
		if w.objects[key] != nil {
			return nil, fmt.Errorf("%w: %.64q", ErrKnown, key)
		}
		if o := w.place(key, uint64(n)); o != nil {
			return &Draft{w, o}, nil
		}
		// Whoever lets go from here on rings. What was let go before is seen by another look.
		w.waiting++
		w.working.Add(1)
		w.head.waits.Swap(1)
		o := w.place(key, uint64(n))
		changed := w.changed
		if o == nil && ctx.Err() == nil {
			w.mu.Unlock()
			wait(ctx, changed, min(endPoll, max(w.cfg.Patience, time.Millisecond)))
			w.mu.Lock()
		}
		if w.waiting--; w.waiting == 0 {
			w.head.waits.Store(0)
		}
		w.working.Done()
		if o != nil {
			return &Draft{w, o}, nil
		}
		if ctx.Err() != nil {
			return nil, fmt.Errorf("%w: no %d bytes in one piece: %s: %w", ErrFull, n, w.whoHolds(),
				ctx.Err())
		}
	}
}

// place takes a row and room, for which others go; nil: nothing may go any more. The caller holds
// mu.
func (w *Writer) place(key string, n uint64) *object {
	w.freeRemoved()
	for range placeTries { // readers may hold what was to go
		if len(w.empty) > 0 {
			if at, ok := w.space.take(room(n)); ok {
				o := &object{key: key, row: w.empty[len(w.empty)-1], at: at, length: n}
				w.empty = w.empty[:len(w.empty)-1]
				w.objects[key] = o
				w.open.Add(1) // until Commit or Drop
				return o
			}
		}
		going := w.leastUsed(room(n))
		if len(going) == 0 {
			break
		}
		testpoint.At("ring: chosen")
		for _, o := range going {
			w.evict(o)
		}
	}
	w.sweep(time.Now())
	return nil
}

// leastUsed returns the objects of one piece of n bytes, or of a row, that may go: those among whom
// the one that goes last has not been used for longest. The caller holds mu.
func (w *Writer) leastUsed(n uint64) []*object {
	rows := len(w.empty) > 0
	var may, overdue []*object
	now := time.Now()
	for at := w.order.Front(); at != nil; at = at.Next() {
		o := at.Value.(*object)
		switch {
		case w.touched[o] || w.isHeld(o):
		case !w.isOwed(o):
			if len(may) == 0 && (!rows || room(o.length) >= n) {
				return []*object{o}
			}
			may = append(may, o)
		case now.Sub(o.since) >= w.cfg.Patience:
			overdue = append(overdue, o)
		}
	}
	may = append(may, overdue...)
	if !rows {
		return may[:min(len(may), 1)]
	}
	byPlace := make([]int, len(may)) // indices of may
	for i := range byPlace {
		byPlace[i] = i
	}
	slices.SortFunc(byPlace, func(a, b int) int { return cmp.Compare(may[a].at, may[b].at) })
	var piece []*object
	sort.Search(len(may), func(last int) bool { // the smallest that is enough was asked for last
		found := w.space.pieceWith(n, may, byPlace, last)
		if found != nil {
			piece = found
		}
		return found != nil
	})
	return piece
}

func (w *Writer) isHeld(o *object) bool {
	if w.words[o.row].holds.Load() != 0 {
		return true
	}
	for _, s := range w.seats {
		if s != nil && s.words[o.row].holds.Load() != 0 {
			return true
		}
	}
	return false
}

// isOwed reports whether a reader is to get an object that it has not got.
func (w *Writer) isOwed(o *object) bool {
	for n, s := range w.seats {
		target := w.target(o.row, n)
		if s == nil && w.awaited&(1<<n) != 0 && *target != 0 {
			return true
		}
		if s != nil && !s.left && int32(*target-s.words[o.row].reads.Load()) > 0 {
			return true
		}
	}
	return false
}

func (w *Writer) target(row uint32, n int) *uint32 {
	return &w.targets[int(row)*len(w.seats)+n]
}

// owe has an object wait for each reader to get it once more; first says that none is owed it yet.
// The caller holds mu.
func (w *Writer) owe(o *object, first bool) {
	o.since = time.Now()
	for n, s := range w.seats {
		var reads uint32
		if s != nil {
			reads = s.words[o.row].reads.Load()
		}
		if t := w.target(o.row, n); first || int32(*t-reads) < 0 {
			*t = reads + 1
		} else {
			*t++
		}
	}
}

// forgetDebts is for a reader that has come: what was put before is not owed to it. The caller
// holds mu.
func (w *Writer) forgetDebts(n int) {
	for row := range w.rows {
		*w.target(uint32(row), n) = 0
	}
}

// evict lets an object go, unless a reader has begun to hold it: a reader raises its word before it
// compares the generation, and evict takes that away before it looks at the words. The caller holds
// mu.
func (w *Writer) evict(o *object) {
	w.rows[o.row].generation.Swap(0)
	testpoint.At("ring: taken away")
	if w.isHeld(o) {
		w.rows[o.row].generation.Store(o.generation)
		return
	}
	w.stats.Evicted++
	if w.isOwed(o) {
		w.stats.Overdue++
	}
	w.forgetObject(o)
	w.giveBack(o)
}

// forgetObject takes an object from those that are known. The caller holds mu.
func (w *Writer) forgetObject(o *object) {
	delete(w.objects, o.key)
	delete(w.touched, o)
	if o.place != nil {
		w.order.Remove(o.place)
		o.place = nil
	}
}

func (w *Writer) giveBack(o *object) {
	w.space.giveBack(o.at, room(o.length))
	w.empty = append(w.empty, o.row)
}

// freeRemoved gives back the room of what was removed and is not held any more. The caller holds
// mu.
func (w *Writer) freeRemoved() {
	held := w.removed[:0]
	for _, o := range w.removed {
		if w.isHeld(o) {
			held = append(held, o)
			continue
		}
		w.giveBack(o)
	}
	clear(w.removed[len(held):])
	w.removed = held
}

// whoHolds says in words what keeps the ring full. The caller holds mu.
func (w *Writer) whoHolds() string {
	var touched, owed, drafts int
	var overdue time.Duration
	for _, o := range w.objects {
		switch {
		case o.place == nil:
			drafts++
		case w.touched[o]:
			touched++
		case w.isOwed(o):
			owed++
			overdue = max(overdue, time.Since(o.since))
		}
	}
	text := fmt.Sprintf("of %d objects %d are touched, %d are being written, and %d wait for "+
		"readers, the longest for %v", len(w.objects)+len(w.removed), touched, drafts, owed,
		overdue.Round(time.Millisecond))
	for _, s := range w.seats {
		if s == nil {
			continue
		}
		held, bytes := 0, uint64(0)
		count := func(o *object) {
			if s.words[o.row].holds.Load() != 0 {
				held++
				bytes += o.length
			}
		}
		for _, o := range w.objects {
			count(o)
		}
		for _, o := range w.removed {
			count(o)
		}
		if held > 0 {
			text += fmt.Sprintf("; reader %d (process %d) holds %d of %d bytes", s.number,
				s.process.PID, held, bytes)
		}
	}
	return text
}

// Bytes are where the object is to be written.
func (d *Draft) Bytes() []byte {
	return d.w.data[d.o.at : d.o.at+d.o.length : d.o.at+d.o.length]
}

// Commit lets readers get the object, which may not be written to any more, and hands it out to
// each.
func (d *Draft) Commit() Handle {
	w, o := d.w, d.o
	var sum uint32
	if w.sums {
		sum = digest.CRC32C(d.Bytes())
	}
	w.mu.Lock()
	defer w.mu.Unlock()
	w.generation++
	o.generation = w.generation
	w.owe(o, true)
	o.place = w.order.PushBack(o)
	r := &w.rows[o.row]
	r.at, r.length, r.sum = o.at, o.length, sum
	testpoint.At("ring: written")
	r.generation.Store(o.generation)
	w.stats.Puts++
	w.open.Add(-1)
	d.o = nil
	return Handle{o.row, o.generation}
}

// Drop gives the room back: nothing was put. Behind Commit, or another Drop, it does nothing.
func (d *Draft) Drop() {
	if d.o == nil {
		return
	}
	d.w.mu.Lock()
	defer d.w.mu.Unlock()
	d.w.forgetObject(d.o)
	d.w.giveBack(d.o)
	d.w.open.Add(-1)
	d.o = nil
	d.w.wake()
}

// Put copies an object into the ring: Reserve, the parts one behind the other, Commit.
func (w *Writer) Put(ctx context.Context, key string, parts ...[]byte) (Handle, error) {
	n := 0
	for _, p := range parts {
		n += len(p)
	}
	d, err := w.Reserve(ctx, key, n)
	if err != nil {
		return Handle{}, err
	}
	to := d.Bytes()
	for _, p := range parts {
		to = to[copy(to, p):]
	}
	return d.Commit(), nil
}

// Handle hands the object of a key out to each reader once more. It ends a Touch.
func (w *Writer) Handle(key string) (h Handle, ok bool) {
	w.mu.Lock()
	defer w.mu.Unlock()
	o := w.committed(key)
	if o == nil {
		return h, false
	}
	delete(w.touched, o)
	w.owe(o, false)
	w.order.MoveToBack(o.place)
	w.stats.Handles++
	return Handle{o.row, o.generation}, true
}

// committed returns the object of a key. The caller holds mu.
func (w *Writer) committed(key string) *object {
	if o := w.objects[key]; o != nil && o.place != nil {
		return o
	}
	return nil
}

// Find returns the handle of a key, and changes nothing: the object may go before it is got.
func (w *Writer) Find(key string) (h Handle, ok bool) {
	w.mu.Lock()
	defer w.mu.Unlock()
	o := w.committed(key)
	if o == nil {
		return h, false
	}
	return Handle{o.row, o.generation}, true
}

// Touch keeps the object of a key until Handle or EndTouches, and reports whether there is one.
func (w *Writer) Touch(key string) bool {
	w.mu.Lock()
	defer w.mu.Unlock()
	o := w.committed(key)
	if o == nil {
		return false
	}
	w.touched[o] = true
	w.order.MoveToBack(o.place)
	return true
}

// EndTouches ends each Touch.
func (w *Writer) EndTouches() {
	w.mu.Lock()
	defer w.mu.Unlock()
	clear(w.touched)
	w.wake()
}

// Remove has readers find the object of a key no more, and reports whether there was one. Views of
// it stay as they are; its room is free behind the last.
func (w *Writer) Remove(key string) bool {
	w.mu.Lock()
	defer w.mu.Unlock()
	o := w.committed(key)
	if o != nil {
		w.remove(o)
		w.wake()
	}
	return o != nil
}

func (w *Writer) remove(o *object) {
	w.rows[o.row].generation.Store(0)
	w.forgetObject(o)
	w.removed = append(w.removed, o)
}

// Clear is Remove of all objects.
func (w *Writer) Clear() {
	w.mu.Lock()
	defer w.mu.Unlock()
	for _, o := range w.objects {
		if o.place != nil {
			w.remove(o)
		}
	}
	w.wake()
}

// Get holds an object for the writer's own process. Config.Await and Put do not count it.
func (w *Writer) Get(h Handle) (*View, error) { return w.get(h) }

// Stats tells what the writer has done and has.
func (w *Writer) Stats() Stats {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.freeRemoved()
	s := w.stats
	s.Objects, s.Bytes = len(w.objects)+len(w.removed), w.cfg.Bytes
	for _, f := range w.space.free {
		s.Free += f.length
	}
	for _, seat := range w.seats {
		if seat != nil {
			s.Readers++
		}
	}
	return s
}

// Close ends the ring: nobody joins or waits any more. Readers keep what they hold, and get what
// was there. While the writer's own Views or Drafts are open it is driver.ErrBusy, and nothing has
// changed.
func (w *Writer) Close() error {
	w.mu.Lock() // a Reserve begins before, and leaves a Draft, or finds the ring closed
	err := w.member.close()
	if err == nil {
		w.stop()
	}
	w.mu.Unlock()
	if err != nil {
		return err
	}
	testpoint.At("ring: closing")
	err = w.listener.Close() // removes the socket's file
	w.mu.Lock()
	for conn := range w.conns {
		_ = conn.CloseWrite() // tells the reader, also where a child has the descriptor still
		_ = conn.Close()      // the end of a conversation in which nothing is under way
	}
	w.wake()
	w.mu.Unlock()
	w.working.Wait()
	w.mu.Lock()
	defer w.mu.Unlock()
	clear(w.objects)
	w.order.Init()
	w.removed = nil
	return errors.Join(err, w.unmap())
}

func (w *Writer) unmap() (err error) {
	if w.table != nil {
		err = errors.Join(unix.Munmap(w.table), os.NewSyscallError("close", unix.Close(w.tableFD)))
	}
	if w.data != nil {
		err = errors.Join(err, hostmem.Unmap(w.data), os.NewSyscallError("close",
			unix.Close(w.dataFD)))
	}
	return err
}
