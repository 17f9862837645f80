// SPDX-License-Identifier: Apache-2.0

package engine

import (
	"fmt"
	"slices"

	"github.com/sluicehq/sluice/driver"
	"github.com/sluicehq/sluice/internal/wire"
)

// slot is a place of the staging memory and the piece that passes through it. spec/chain.pml is
// a model of how it ends; words in brackets, here and in chain_window.go, are its steps.
type slot struct {
	sp    *stagedPeer
	pool  *pool
	index int
	at    uint64 // offset in the pool, and in the peer's

	// The piece.
	job   *stagedJob // nil: free
	c     chain
	local *stagedMemory
	to    *Remote
	descs []driver.Desc
	pages driver.Pattern
	paged bool
	bytes uint64

	step     step
	answered bool // the peer has made its hop, or refused
	answer   error
	number   uint32 // of the piece, in messages
	stuck    bool   // takes no more pieces: the peer owes an answer
	lost     bool   // nor this, and a hop was given up: a backend may still use the bytes

	near, by [2]*Transfer // by Op-1
	notice   *Transfer    // withdraws the piece
	again    bool         // it was still on its way for another
	current  *Transfer
	message  []byte
	hook     func()
}

// step is the hop or answer that a piece waits for.
type step uint8

const (
	atRest step = iota
	atNear      // local memory and staging memory
	atAsk       // the list is on its way to the peer
	atHand      // the peer has it in hand
	atBy        // staging memory, or local DRAM, and the peer
)

// The steps of a piece, in order, each where the chain has it.
var (
	writeSteps = []step{atNear, atBy, atHand}
	readSteps  = []step{atAsk, atHand, atBy, atNear}
)

func newSlot(sp *stagedPeer, pool *pool, i int) *slot {
	s := &slot{sp: sp, pool: pool, index: i, at: uint64(i) * slotBytes}
	ended := s.hopEnded
	s.hook = func() { sp.loop.push(ended) }
	return s
}

// isMoving reports whether the end of a piece is still to come.
func (s *slot) isMoving() bool { return s.job != nil && !s.lost }

// begin cuts the next piece off a batch and makes its first hop.
func (s *slot) begin(j *stagedJob, c chain) {
	local, to := j.ends()
	s.local, s.to = local, to.Remote
	s.job, s.c, s.paged, s.bytes = j, c, j.paged, 0
	s.answered, s.answer = false, nil
	s.number++
	j.flying++
	if j.paged {
		n := min(j.pages.Count, int(pieceBytes/j.pages.Run), wire.IndicesMax)
		if s.pages = j.pages; n < j.pages.Count {
			s.pages = cutPattern(&j.pages, n)
		} else {
			j.pages.Count = 0
		}
		s.bytes = s.pages.Bytes()
		s.proceed()
		return
	}
	first, n := &j.descs[0], 0
	for n < len(j.descs) && n < wire.DescsMax {
		d := &j.descs[n]
		if d.LocalKey != first.LocalKey || d.RemoteKey != first.RemoteKey ||
			s.bytes+d.Len > pieceBytes {
			break
		}
		s.bytes += d.Len
		n++
	}
	s.descs, j.descs = j.descs[:n:n], j.descs[n:]
	s.proceed()
}

// hopEnded goes on after a hop.
func (s *slot) hopEnded() {
	if s.current == nil {
		return
	}
	t := s.current
	if !t.Done() {
		return // the hook of an earlier post
	}
	if t.isUnproven() {
		// Its bytes are no longer ours to give, nor is the batch ours to complete: the
		// engine gives that up, too.
		s.lost, s.current = true, nil
		s.sp.schedule()
		return
	}
	s.current = nil
	err := t.Err()
	_ = t.Reset()
	if err != nil {
		s.failed(fmt.Errorf("%s: %w", s.hopName(), err))
		return
	}
	s.proceed()
}

// failed ends the piece [acknowledgement], unless the peer may have been asked to place it: over a
// connection that was lost, or is lost now, the message of a batch that failed may have arrived.
// Only the peer knows, so it is asked to make no such hop.
func (s *slot) failed(err error) {
	if s.step != atBy || s.job.op != Write || !s.c.far || s.answered {
		s.finish(err)
		return
	}
	s.job.fail(err)
	s.await()
}

// proceed makes the next hop of the piece, or waits for the peer's, or ends the piece.
func (s *slot) proceed() {
	if s.step == atHand && s.answer != nil {
		s.finish(fmt.Errorf("the peer's hop, dram to %v: %w", s.to.kind, s.answer))
		return
	}
	steps := readSteps
	if s.job.op == Write {
		steps = writeSteps
	}
	for _, to := range steps[slices.Index(steps, s.step)+1:] { // from the first where it is at rest
		switch {
		case to == atNear && s.c.near == nil, (to == atAsk || to == atHand) && !s.c.far:
			continue
		case to == atHand:
			s.await()
		default:
			s.hop(to)
		}
		return
	}
	s.finish(nil)
}

// await waits for the peer's answer [hand], which may be here already.
func (s *slot) await() {
	s.step = atHand
	switch {
	case s.answered:
		s.proceed()
	case s.sp.p.conns[s.c.by.index].isLost():
		s.giveUp(true) // carrierLost may have been here before us
	case s.sp.forced:
		s.giveUp(false)
	case s.job.err != nil:
		s.stop()
	}
}

// hop starts one, unless the batch has ended meanwhile.
func (s *slot) hop(to step) {
	s.step = to
	switch {
	case s.job.err != nil:
		s.finish(nil)
	case to == atNear:
		number := s.number
		s.sp.local.with(s.c.near, func(self *Peer, err error) {
			switch {
			case s.job == nil || s.number != number: // given up meanwhile
			case s.job.err != nil:
				s.finish(nil)
			case err != nil:
				s.post(nil, err)
			default:
				s.post(s.prepareNear(self))
			}
		})
	default:
		s.post(s.prepareHop(to))
	}
}

// post starts the hop for which t is filled.
func (s *slot) post(t *Transfer, err error) {
	if err == nil {
		t.extra().hook = s.hook
		s.current = t
		err = t.Post()
	}
	if err != nil {
		s.current = nil
		if t != nil {
			_ = t.Reset()
		}
		s.finish(fmt.Errorf("%s: %w", s.hopName(), err))
	}
}

// finish frees the slot.
func (s *slot) finish(err error) {
	j := s.job
	if err != nil {
		j.fail(err)
	}
	s.job, s.step, s.local, s.to, s.descs, s.pages = nil, atRest, nil, nil, nil, driver.Pattern{}
	j.flying--
	if !j.more() {
		s.sp.settle(j)
	}
	s.sp.schedule()
}

// stop ends the hop that is under way: hopEnded follows.
func (s *slot) stop() {
	switch {
	case s.current != nil:
		s.current.stop(s.current.state().generation(), ErrAborted)
	case s.step == atHand:
		s.withdraw()
	}
}

// giveUp waits for the peer's answer no longer [giveUp]. The peer may still place a piece of a
// write that it has in hand; one of a read, in staging memory of its own. Where the connection is
// lost that memory is used no more: the next piece goes by another's.
func (s *slot) giveUp(carrierLost bool) {
	if s.lost {
		return // a backend has a hop of it still
	}
	if s.job != nil && s.step == atNear && s.current == nil {
		s.finish(ErrClosed) // it waits for a local Peer
		return
	}
	if s.job == nil || s.step != atHand {
		return
	}
	s.stuck = !carrierLost // the peer has the place in hand
	if s.job.op == Write {
		s.job.unanswered++
	}
	s.finish(ErrPeerLost)
}

// close gives the transfers back. It reports false when a backend may still use the bytes.
func (s *slot) close() bool {
	for _, t := range []*Transfer{s.near[0], s.near[1], s.by[0], s.by[1]} {
		if t != nil && (t.Close() != nil || t.isUnproven()) {
			s.lost = true
		}
	}
	return s.current == nil && !s.lost
}

func (s *slot) hopName() string {
	switch s.step {
	case atNear:
		return fmt.Sprintf("hop between %v and dram with %s", s.local.region.Kind(),
			s.c.near.caps.Name)
	case atAsk:
		return "request to the peer with " + s.c.by.caps.Name
	}
	return "hop between here and the peer with " + s.c.by.caps.Name
}

// prepareHop fills a transfer with what the step moves between here and the peer: the request of a
// read, or the piece. A write to the peer's slot tells the peer then.
func (s *slot) prepareHop(to step) (*Transfer, error) {
	op := s.job.op
	if to == atAsk {
		op = Write
	}
	t, err := renewTransfer(&s.by, s.sp.p, op, Route{Only: s.c.by.caps.Name,
		Durable: s.job.durable && !s.c.far})
	switch {
	case err != nil:
		return nil, err
	case to == atAsk:
		return t, s.addRequest(t, wire.KindGet)
	case !s.c.far:
		return t, s.add(t, s.pool.region, s.to, inSlot, asRemote)
	case s.c.near != nil:
		err = t.Add(s.pool.region, s.at, s.window().remote, s.at, s.bytes)
	default:
		err = s.add(t, s.local.region, s.window().remote, asLocal, inSlot)
	}
	if err == nil && op == Write {
		err = s.addRequest(t, wire.KindPut)
	}
	return t, err
}

// prepareNear goes by the engine's own peer, to which the local memory is remote.
func (s *slot) prepareNear(self *Peer) (*Transfer, error) {
	op := Read
	if s.job.op == Read {
		op = Write
	}
	own, err := s.local.own(self)
	if err != nil {
		return nil, err
	}
	t, err := renewTransfer(&s.near, self, op, Route{Only: s.c.near.caps.Name})
	if err != nil {
		return nil, err
	}
	return t, s.add(t, s.pool.region, own, inSlot, asLocal)
}

// window is the peer's staging memory, as the lane of the piece reaches it.
func (s *slot) window() *farWindow { return s.sp.farWindows[s.c.by] }

// place is where a side of a hop has the bytes of the piece: one after the other in the slot, or as
// the batch lists its local or its remote side.
type place uint8

const (
	inSlot place = iota
	asLocal
	asRemote
)

// add lists the piece between two memories.
func (s *slot) add(t *Transfer, local *Region, m *Remote, from, to place) error {
	if s.paged {
		sides := [...]Side{inSlot: {Base: s.at, Stride: s.pages.Run}, asLocal: s.pages.Local,
			asRemote: s.pages.Remote}
		p := s.pages
		p.Local, p.Remote = sides[from], sides[to]
		return t.AddPattern(local, m, p)
	}
	at := s.at
	for i := range s.descs {
		d := &s.descs[i]
		offs := [...]uint64{inSlot: at, asLocal: d.Local, asRemote: d.Remote}
		if err := t.Add(local, offs[from], m, offs[to], d.Len); err != nil {
			return err
		}
		at += d.Len
	}
	return nil
}

// addRequest has the list follow, and the message that asks for the peer's hop.
func (s *slot) addRequest(t *Transfer, what byte) error {
	if err := s.makeNotice(); err != nil {
		return err
	}
	at := s.at + pieceBytes
	list := s.pool.region.Bytes()[at:][:wire.ListBytes]
	h := wire.Hop{Slot: uint16(s.index), Number: s.number,
		Token: s.to.tokens[s.sp.s.lane.index], Durable: s.job.durable}
	n := uint64(0)
	if s.paged {
		n = h.ListEntries(list, &s.pages)
	} else {
		n = h.ListDescs(list, s.descs)
	}
	if n > 0 {
		if err := t.Add(s.pool.region, at, s.window().remote, at, n); err != nil {
			return err
		}
	}
	s.message = h.Append(append(s.message[:0], what))
	t.attachFrame(s.message)
	return nil
}

// makeNotice has a withdrawal's transfer there before the peer may need one: later the program may
// have all that there may be.
func (s *slot) makeNotice() error {
	if s.notice != nil {
		if s.notice.route.Only == s.c.by.caps.Name {
			return nil
		}
		if err := s.notice.Close(); err != nil { // that of an earlier piece is on its way
			return fmt.Errorf("withdrawal: %w", err)
		}
		s.notice = nil
	}
	t, err := s.sp.s.e.NewTransfer(s.sp.p, Write, Route{Only: s.c.by.caps.Name})
	if err != nil {
		return fmt.Errorf("withdrawal: %w", err)
	}
	t.extra().hook = func() { s.sp.loop.push(s.noticeSent) }
	s.notice = t
	return nil
}

// withdraw asks the peer not to make its hop, or to end it [withdraw]. Its answer follows all the
// same.
func (s *slot) withdraw() {
	if s.notice != nil && s.notice.state().underWay() {
		s.again = true // that of an earlier piece, or the peer takes nothing now
		return
	}
	s.again = false
	h := wire.Hop{Slot: uint16(s.index), Number: s.number}
	s.notice.attachFrame(h.AppendName([]byte{wire.KindWithdrawn}))
	_ = s.notice.Post()
}

// noticeSent is called when a withdrawal is on its way. One for another piece may have to follow.
func (s *slot) noticeSent() {
	if s.again && s.job != nil && s.job.err != nil && s.step == atHand {
		s.withdraw()
	}
}

// ownOp is the direction of a hop between staging memory, which is local to it, and memory
// of the engine's own peer.
func ownOp(what byte) driver.Op {
	if what == wire.KindPut {
		return Write
	}
	return Read
}

// stagedJob is a batch.
type stagedJob struct {
	sp    *stagedPeer
	op    driver.Op
	tag   uint64
	descs []driver.Desc  // that have no slot yet
	pages driver.Pattern // the same
	paged bool

	durable bool

	flying     int // pieces
	unanswered int // pieces that the peer had in hand and did not answer for
	err        error
}

// check looks the memories up, and refuses a read into ReadOnly memory of a device or a file: the
// last hop of a chain writes it as a peer does. Bounds were checked when the program listed the
// bytes, and are again when each hop lists its own.
func (j *stagedJob) check() error {
	pair := func(localKey, remoteKey uint32) error {
		l, m := j.sp.s.memory(localKey), j.sp.remote(remoteKey)
		if l == nil || m == nil {
			return fmt.Errorf("local key %d, remote key %d: %w", localKey, remoteKey, ErrBounds)
		}
		if seg := &l.region.seg; j.op == driver.Read && seg.ReadOnly && seg.Kind != driver.DRAM {
			return fmt.Errorf("a chain fills a region as a peer does, and this one is ReadOnly: "+
				"register it without, or fill it from DRAM: %w", driver.ErrReadOnly)
		}
		return nil
	}
	if j.paged {
		return pair(j.pages.LocalKey, j.pages.RemoteKey)
	}
	for i := range j.descs {
		d := &j.descs[i]
		if i > 0 && j.descs[i-1].LocalKey == d.LocalKey &&
			j.descs[i-1].RemoteKey == d.RemoteKey {
			continue
		}
		if err := pair(d.LocalKey, d.RemoteKey); err != nil {
			return &driver.PieceError{Piece: i, Err: err}
		}
	}
	return nil
}

func (sp *stagedPeer) remote(key uint32) *stagedRemote {
	sp.mu.Lock()
	defer sp.mu.Unlock()
	return sp.remotes[key]
}

func (j *stagedJob) more() bool {
	if j.err != nil {
		return false
	}
	return len(j.descs) > 0 || j.paged && j.pages.Count > 0
}

// fail keeps the first cause.
func (j *stagedJob) fail(err error) {
	if j.err == nil {
		j.err = err
	}
}

func (j *stagedJob) outcome() error {
	if j.unanswered == 0 {
		return j.err
	}
	return fmt.Errorf("the peer has not answered for %d pieces that it has in hand: %w: %w",
		j.unanswered, driver.ErrUnproven, j.err)
}

// begin takes a batch.
func (sp *stagedPeer) begin(j *stagedJob) {
	if sp.closing {
		j.fail(ErrClosed)
	}
	sp.jobs[j.tag] = j
	sp.queue = append(sp.queue, j)
	sp.schedule()
}

// schedule gives free slots to batches, a piece each in turn, and completes the batches that have
// ended.
func (sp *stagedPeer) schedule() {
	for i := 0; i < len(sp.queue); {
		j := sp.queue[0]
		if !j.more() {
			sp.queue = sp.queue[1:]
			sp.settle(j)
			continue
		}
		c, err := j.plan()
		if err != nil {
			j.fail(err)
			continue
		}
		sp.queue = append(sp.queue[1:], j)
		s := sp.freeSlot(&c)
		if s == nil {
			i++ // the others may go by another chain
			continue
		}
		i = 0
		s.begin(j, c)
	}
	if sp.idle != nil && !slices.ContainsFunc(sp.slots, (*slot).isMoving) {
		close(sp.idle)
		sp.idle = nil
	}
}

// plan is the chain of the next piece.
func (j *stagedJob) plan() (chain, error) {
	local, remote := j.ends()
	if local == nil || remote == nil {
		return chain{}, ErrRevoked // closed since it was submitted
	}
	j.sp.mu.Lock()
	defer j.sp.mu.Unlock()
	c, ok := remote.chains[shape(local.region, j.durable)]
	if !ok {
		return c, errNotPrepared
	}
	return c, nil
}

func (j *stagedJob) ends() (*stagedMemory, *stagedRemote) {
	if j.paged {
		return j.sp.s.memory(j.pages.LocalKey), j.sp.remote(j.pages.RemoteKey)
	}
	return j.sp.s.memory(j.descs[0].LocalKey), j.sp.remote(j.descs[0].RemoteKey)
}

func (sp *stagedPeer) freeSlot(c *chain) *slot {
	for _, s := range sp.slots {
		if s.job == nil && !s.stuck && !s.lost && (!c.far || s.index < sp.farWindows[c.by].slots) {
			return s
		}
	}
	return nil
}

// settle completes a batch of which nothing is left.
func (sp *stagedPeer) settle(j *stagedJob) {
	if j.flying > 0 || j.more() || sp.jobs[j.tag] != j {
		return
	}
	delete(sp.jobs, j.tag)
	sp.pending.Add(-1)
	sp.s.complete(j.tag, j.outcome())
}

var errNotPrepared = fmt.Errorf("the way between the two memories was not prepared: Reset the "+
	"transfer and Add anew: %w", ErrNoRoute)
