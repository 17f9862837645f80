// SPDX-License-Identifier: Apache-2.0

//go:build cgo

package ucx

import (
	"bytes"
	"slices"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/sluicehq/sluice/csrc/ring"
	"github.com/sluicehq/sluice/driver"
	"github.com/sluicehq/sluice/internal/hostmem"
	"github.com/sluicehq/sluice/internal/testing/testkit"
)

func TestForgedMessagesChangeNothing(t *testing.T) {
	const huge = 1 << 63
	good := forged{kind: msgWrite, ticket: victimTicket, key: 7, size: 8}
	eight := []byte("EIGHT...")
	with := func(change func(f *forged)) forged {
		f := good
		change(&f)
		return f
	}
	forgeries := map[string]struct {
		head forged
		data []byte
	}{
		"a wrong ticket":         {with(func(f *forged) { f.ticket++ }), eight},
		"no ticket":              {with(func(f *forged) { f.ticket = 0 }), eight},
		"a free key":             {with(func(f *forged) { f.key, f.ticket = 9, 0 }), eight},
		"a key beyond the table": {with(func(f *forged) { f.key = 1 << 31 }), eight},
		"read-only":              {with(func(f *forged) { f.key = 8 }), eight},
		"beyond the end": {with(func(f *forged) {
			f.off = victimTo - victimFrom - 7
		}), eight},
		"before the begin": {with(func(f *forged) { f.off = ^uint64(0) - 3 }), eight},
		"fewer bytes":      {with(func(f *forged) { f.size = huge }), eight},
		"more bytes":       {with(func(f *forged) { f.size = 1 }), eight},
		"no table":         {with(func(f *forged) { f.count = ^uint32(0) }), eight},
		"a row beyond": {with(func(f *forged) {
			f.count, f.off = 1, 16
		}), append(table(victimTo-victimFrom-7, 8), eight...)},
		"a row before": {with(func(f *forged) {
			f.count, f.off = 1, 16
		}), append(table(^uint64(0)-3, 8), eight...)},
		"rows that wrap": {with(func(f *forged) { f.count, f.off = 2, 32 }),
			append(table(0, huge, 0, huge), eight...)},
		"a long row": {with(func(f *forged) {
			f.count, f.off = 1, 16
		}), append(table(0, huge), eight...)},
		"bytes far behind": {with(func(f *forged) {
			f.count, f.off = 1, huge
		}), append(table(0, 8), eight...)},
		"bytes before": {with(func(f *forged) {
			f.count, f.off = 1, ^uint64(0)-3
		}), append(table(0, 8), eight...)},
		"a huge read": {with(func(f *forged) { f.kind, f.size = msgRead, huge }), nil},
		"a large read": {with(func(f *forged) {
			f.kind, f.size, f.flags = msgRead, 1<<30, 0
		}), nil},
		"a read of a huge table": {with(func(f *forged) { f.kind, f.count = msgRead, ^uint32(0) }),
			table(0, 8)},
		"a read of more than a message": {with(func(f *forged) {
			f.kind, f.count, f.size = msgRead, 5, 5*(victimTo-victimFrom)
		}), table(slices.Repeat([]uint64{0, victimTo - victimFrom}, 5)...)},
		"a read beyond": {with(func(f *forged) {
			f.kind, f.count = msgRead, 1
		}), table(victimTo-victimFrom, 8)},
		"an answer to nothing":  {forged{kind: msgData, seq: 3, size: 8}, eight},
		"thanks for nothing":    {forged{kind: msgAck, seq: ^uint32(0)}, nil},
		"thanks for everything": {forged{kind: msgAck, seq: 1 << 30}, nil},
		"a question":            {forged{kind: msgAsk, seq: 1 << 30}, nil},
		"too long a message":    {forged{kind: msgNotif}, make([]byte, 5000)},
		"too long a control":    {forged{kind: msgControl}, make([]byte, 5000)},
		"credit":                {forged{kind: msgCredit, off: huge}, nil},
		"no kind":               {forged{kind: 77}, eight},
		"the end":               {forged{kind: msgReset}, nil},
	}
	v := openVictim(t)
	before := bytes.Clone(v.mem)
	for name, m := range forgeries {
		for _, rendezvous := range []bool{false, true} {
			m.head.conn = v.conn.ID()
			if rendezvous {
				v.f.announce(m.head, max(len(m.data), 64<<10))
			} else {
				v.f.send(m.head, m.data)
			}
			v.alive(t)
			require.True(t, bytes.Equal(before, v.mem), "%s (rendezvous: %v) changed memory", name,
				rendezvous)
		}
	}
	for _, head := range [][]byte{nil, {1}, good.bytes()[:headBytes-1], append(good.bytes(), 0),
		good.bytes()} {
		// of version 0, too
		v.f.raw('e', head, eight)
	}
	for _, conn := range []uint64{0, 1, v.conn.ID() + 1, v.conn.ID() ^ 1<<63} {
		v.f.send(with(func(f *forged) { f.conn = conn }), eight)
	}
	v.alive(t)
	require.True(t, bytes.Equal(before, v.mem), "a head that is none changed memory")
	// And what is right is done, in its range alone.
	v.f.send(with(func(f *forged) { f.conn, f.off = v.conn.ID(), 100 }), eight)
	v.alive(t)
	copy(before[victimFrom+100:], eight)
	require.True(t, bytes.Equal(before, v.mem), "a sound write changed other memory than it named")
}

// read submits one and returns the request that the forger got.
func (v *victim) read(t *testing.T, tag uint64, d ...driver.Desc) forged {
	t.Helper()
	slot, err := v.conn.Import(Import{Key: 1, Size: 1 << 20, Ticket: 5})
	require.NoError(t, err)
	for i := range d {
		d[i].LocalKey, d[i].RemoteKey = 7, slot
	}
	require.NoError(t, submit(v.conn, driver.Read, tag, d, nil))
	return v.f.await(msgRead)
}

func (v *victim) outcome(t *testing.T, tag uint64) error {
	t.Helper()
	var done [1]ring.Done
	for end := time.Now().Add(testLimit); v.Poll(done[:]) == 0; {
		require.False(t, time.Now().After(end), "tag %d does not complete", tag)
		// what it was told to send may wait for the connection, and it moves only when told
		v.f.tell("poll 5")
	}
	require.EqualValues(t, tag, done[0].Tag, "tag completed")
	return Error(done[0])
}

// TestOldWritesAreAskedAbout sends a write that was on its way for longer than Grace: it lands,
// and what follows it is received, once the sender has confirmed it since.
func TestOldWritesAreAskedAbout(t *testing.T) {
	v := openVictim(t)
	before := bytes.Clone(v.mem)
	eight := []byte("eight888")
	write := forged{kind: msgWrite, conn: v.conn.ID(), ticket: victimTicket, key: 7, size: 8,
		flags: flagFirst, echo: 1}
	v.f.send(write, eight)
	v.f.await(msgConfirm)
	write.off, write.echo = 100, 0
	v.f.send(write, eight) // behind it
	v.f.send(forged{kind: msgNotif, conn: v.conn.ID(), flags: flagChecked}, []byte("arrived"))
	v.alive(t)
	require.True(t, bytes.Equal(before, v.mem), "an old write landed, or one overtook it")
	if _, early := v.Receive(); early {
		t.Fatal("a notification overtook its bytes")
	}
	v.f.send(forged{kind: msgConfirmed, conn: v.conn.ID(), echo: 1}, nil)
	v.f.await(msgConfirm)
	require.True(t, bytes.Equal(before, v.mem), "an old confirmation counted")
	copy(before[victimFrom:], eight)
	copy(before[victimFrom+100:], eight)
	v.lands(t, forged{kind: msgConfirmed, conn: v.conn.ID()}, before, clock)
	notif, ok := v.Receive()
	require.True(t, ok)
	require.Equal(t, "arrived", string(notif.Data))
}

// lands confirms, with an echo, until what was held has landed: a confirmation that a busy machine
// brings too late is too old itself.
func (v *victim) lands(t *testing.T, confirmed forged, want []byte, echo func() uint64) {
	t.Helper()
	for end := time.Now().Add(testLimit); !bytes.Equal(want, v.mem); {
		require.True(t, time.Now().Before(end), "what was confirmed does not land")
		confirmed.echo = echo()
		v.f.send(confirmed, nil)
		v.alive(t)
	}
}

// TestOldWritesOfAnEndThatIsOver has the sender end, by the message that says so, before it
// confirms.
func TestOldWritesOfAnEndThatIsOver(t *testing.T) {
	v := openVictim(t)
	before := bytes.Clone(v.mem)
	write := forged{kind: msgWrite, conn: v.conn.ID(), ticket: victimTicket, key: 7, size: 8,
		flags: flagFirst, echo: 1}
	v.f.send(write, []byte("eight888"))
	v.f.await(msgConfirm)
	v.f.send(forged{kind: msgReset, conn: v.conn.ID()}, nil)
	v.f.send(forged{kind: msgConfirmed, conn: v.conn.ID()}, nil)
	var news Control
	require.Eventually(t, func() bool {
		v.f.tell("poll 5")
		var ok bool
		news, ok = v.Control()
		return ok
	}, testLimit, time.Millisecond)
	require.True(t, news.Lost && news.Over)
	require.True(t, bytes.Equal(before, v.mem))
}

func TestForgedAnswers(t *testing.T) {
	v := openVictim(t)
	before := bytes.Clone(v.mem)
	answer := forged{kind: msgData, conn: v.conn.ID()}
	long := bytes.Repeat([]byte{0xaa}, 120)
	for tag, data := range [][]byte{long, long[:99], nil} { // not what was asked for
		answer.seq = v.read(t, uint64(tag), driver.Desc{Local: 10, Len: 100}).seq
		v.f.send(answer, data)
		require.Error(t, v.outcome(t, uint64(tag)), "an answer of %d bytes in the place of 100",
			len(data))
	}
	require.True(t, bytes.Equal(before, v.mem), "answers that are none changed memory")
	// Cancelled, and answered afterwards.
	answer.seq = v.read(t, 11, driver.Desc{Local: 10, Len: 100}).seq
	v.conn.Cancel(11)
	require.ErrorIs(t, v.outcome(t, 11), driver.ErrAborted)
	v.f.send(answer, long[:100])
	v.alive(t)
	require.True(t, bytes.Equal(before, v.mem), "the answer to a cancelled read landed")
	// Twice.
	answer.seq = v.read(t, 12, driver.Desc{Local: 10, Len: 100}).seq
	v.f.send(answer, long[:100])
	require.NoError(t, v.outcome(t, 12))
	copy(before[victimFrom+10:], long[:100])
	v.f.send(answer, bytes.Repeat([]byte{0xbb}, 100))
	v.alive(t)
	require.True(t, bytes.Equal(before, v.mem), "the second answer landed")
}

// TestMessagesWithoutCredit: a peer that sends far more than it may is lost, and what is kept of it
// is bounded.
func TestMessagesWithoutCredit(t *testing.T) {
	v := openVictim(t)
	const kept = 1024
	for range kept + 200 {
		v.f.tell("send e %x #%d", forged{kind: msgNotif, conn: v.conn.ID(),
			version: messageVersion}.bytes(), 16)
	}
	v.f.tell("poll 200")
	awaitLoss(t, v.Context)
	got := 0
	for _, ok := v.Receive(); ok; _, ok = v.Receive() {
		got++
	}
	if got < 100 || got > kept {
		t.Errorf("%d messages of a peer without credit were kept, at most %d", got, kept)
	}
}

func FuzzMessage(f *testing.F) {
	f.Add(forged{version: messageVersion, kind: msgWrite, ticket: victimTicket, key: 7,
		size: 8}.bytes(), []byte("EIGHT..."), false)
	f.Add(forged{version: messageVersion, kind: msgRead, ticket: victimTicket, key: 7, size: 8,
		count: 1}.bytes(), table(0, 8), false)
	f.Add(forged{version: messageVersion, kind: msgData}.bytes(), table(0, 8), true)
	v := openVictim(f)
	before := bytes.Clone(v.mem)
	f.Fuzz(func(t *testing.T, head, data []byte, rendezvous bool) {
		if len(head) > 1000 || len(data) > 100<<10 {
			return
		}
		if v.f.t = t; len(head) >= 16 { // else it is for nobody
			copy(head[8:], table(v.conn.ID()))
		}
		v.f.raw(map[bool]byte{true: 'r', false: 'e'}[rendezvous], head, data)
		v.alive(t)
		for v.f.t = f; ; {
			if _, more := v.Control(); !more {
				break
			}
		}
		copy(before[victimFrom:victimTo], v.mem[victimFrom:victimTo])
		if !bytes.Equal(before, v.mem) {
			t.Fatal("memory was changed that the message does not name")
		}
	})
}

// awaitLoss returns the news that a connection is lost.
func awaitLoss(t *testing.T, c *Context) (news Control) {
	t.Helper()
	require.Eventually(t, func() bool {
		m, ok := c.Control()
		if ok && m.Lost {
			news = m
		}
		return ok && m.Lost
	}, testLimit, time.Millisecond)
	return news
}

// TestAcknowledgementsOfWhatIsNotRead: a peer that acknowledges messages which it has not taken
// does not have a whole transfer copied into messages.
func TestAcknowledgementsOfWhatIsNotRead(t *testing.T) {
	const size = 256 << 20
	buf, err := hostmem.Alloc(size, hostmem.Options{Purpose: "test"})
	require.NoError(t, err)
	t.Cleanup(func() { require.NoError(t, buf.Close()) })
	v := openVictim(t)
	require.NoError(t, v.Map(30, Memory{Mem: buf.Bytes(), Ticket: 1}))
	slot, err := v.conn.Import(Import{Key: 1, Size: size, Ticket: 1})
	require.NoError(t, err)
	require.True(t, v.answers())
	v.f.tell("quiet")
	require.NoError(t, submit(v.conn, driver.Write, 77, []driver.Desc{{LocalKey: 30,
		RemoteKey: slot, Len: size}}, nil))
	for range 300 {
		v.f.send(forged{kind: msgAck, conn: v.conn.ID(), seq: 0x3fffffff}, nil)
		time.Sleep(time.Millisecond)
		require.LessOrEqual(t, int(v.conn.Sends()), 1000, "messages that UCX keeps")
	}
}

// TestCreditForWhatIsNotRead: a peer that gives credit for messages which it has not taken, and for
// those of batches that are cancelled, does not have them pile up here.
func TestCreditForWhatIsNotRead(t *testing.T) {
	v := openVictim(t)
	slot, err := v.conn.Import(Import{Key: 1, Size: 1 << 20, Ticket: 1})
	require.NoError(t, err)
	require.True(t, v.answers())
	v.f.tell("quiet")
	descs := make([]driver.Desc, 600)
	for i := range descs {
		descs[i] = driver.Desc{LocalKey: 7, RemoteKey: slot, Len: victimTo - victimFrom}
	}
	for tag := range uint64(4) { // the window is full, and the last ones wait
		require.NoError(t, submit(v.conn, driver.Write, tag, descs, []byte("x")))
	}
	v.gives(t, 4)
	for tag := range uint64(4) {
		v.conn.Cancel(tag)
	}
	v.gives(t, 1<<31)
	for err == nil {
		err = v.conn.Notify(make([]byte, NotifMax))
		require.LessOrEqual(t, int(v.conn.Sends()), 5000, "messages that UCX keeps")
	}
	require.ErrorIs(t, err, driver.ErrFull)
}

// gives has the forger give credit, and sees that it has come.
func (v *victim) gives(t *testing.T, credit uint64) {
	t.Helper()
	v.f.send(forged{kind: msgCredit, conn: v.conn.ID(), off: credit}, nil)
	v.f.send(forged{kind: msgNotif, conn: v.conn.ID()}, nil)
	require.Eventually(t, func() bool {
		_, came := v.Receive()
		return came
	}, testLimit, time.Millisecond)
}

// TestAnswersThatAreNotTaken: a peer that asks for bytes and takes none is given up, and what UCX
// keeps for it until then is bounded by bytes.
func TestAnswersThatAreNotTaken(t *testing.T) {
	const answer, kept = 60 << 10, 8 << 20
	buf, err := hostmem.Alloc(answer, hostmem.Options{Purpose: "test"})
	require.NoError(t, err)
	t.Cleanup(func() { require.NoError(t, buf.Close()) })
	v := openVictim(t)
	require.NoError(t, v.Map(30, Memory{Mem: buf.Bytes(), Ticket: 1}))
	require.True(t, v.answers())
	v.f.tell("quiet")
	most := 0
	for seq := range uint32(1000) {
		v.f.send(forged{kind: msgRead, conn: v.conn.ID(), ticket: 1, key: 30, size: answer,
			seq: seq}, nil)
		most = max(most, v.conn.Sends())
	}
	awaitLoss(t, v.Context)
	require.LessOrEqual(t, most, kept/answer+8, "answers that UCX keeps")
}

// TestControlIsNotTaken: control messages to a peer that takes none are refused, and not kept
// without an end.
func TestControlIsNotTaken(t *testing.T) {
	const most = 20000
	v := openVictim(t)
	require.True(t, v.answers())
	v.f.tell("quiet")
	var err error
	sent := 0
	for ; err == nil && sent < most; sent++ {
		err = v.conn.Control(make([]byte, ControlMax))
	}
	require.ErrorIs(t, err, driver.ErrFull, "%d were kept", sent)
}

// TestAnswersAreOfTheirEpoch revokes memory that a peer reads who does not take the answers, and
// changes it: what is sent later is what was there before.
func TestAnswersAreOfTheirEpoch(t *testing.T) {
	v := openVictim(t)
	region := v.mem[victimFrom:victimTo]
	for i := range region {
		region[i] = 0x11
	}
	const asked = 300
	for seq := range uint32(asked) {
		v.f.send(forged{kind: msgRead, conn: v.conn.ID(), seq: seq, ticket: victimTicket,
			key: 7, size: victimTo - victimFrom}, nil)
	}
	require.NoError(t, v.Revoke(7, testLimit))
	for i := range region {
		region[i] = 0xee
	}
	v.f.send(forged{kind: msgRead, conn: v.conn.ID(), seq: asked, ticket: victimTicket, key: 7,
		size: 8}, nil)
	for range asked + 1 {
		if v.f.await(msgData).seq == asked {
			break
		}
	}
	if v.f.late > 0 {
		testkit.FatalBroken(t, "bytes that were written after the revoke were sent")
	}
}

// TestNoBatchWaitsForTheTick submits while the thread goes to sleep, which it does for minutes
// here.
func TestNoBatchWaitsForTheTick(t *testing.T) {
	c := overTCP
	c.GraceNanos = uint64(time.Hour)
	l := openLane(t, c)
	for range 2000 {
		l.tag++
		require.NoError(t, submit(l.conn, driver.Write, l.tag,
			[]driver.Desc{l.desc(0, 0, 256<<10)}, nil))
		require.NoError(t, l.outcome(t, l.tag))
		// Somewhat longer and shorter than the thread looks before it sleeps.
		for begin := time.Now(); time.Since(begin) < time.Duration(l.tag%40)*time.Microsecond; {
		}
	}
}
