// SPDX-License-Identifier: Apache-2.0

//go:build cgo

package ucx

import (
	"bufio"
	"encoding/binary"
	"encoding/hex"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/sluicehq/sluice/internal/hostmem"
	"github.com/sluicehq/sluice/internal/proc"
	"github.com/sluicehq/sluice/internal/testing/standin"
)

// The types and flags of message.h.
const (
	msgControl = 1 + iota
	msgWrite
	msgAck
	msgRead
	msgData
	msgNotif
	msgCredit
	msgStarved
	msgPing
	msgAsk
	msgReset
	msgConfirm
	msgConfirmed

	flagFirst   = 1
	flagChecked = 8

	messageVersion = 4
	headBytes      = 72
)

// forged is a head of a message as sl_ucx_head has it.
type forged struct {
	version, kind       uint8
	flags               uint16
	seq                 uint32
	conn, ticket        uint64
	off, size           uint64
	key, count, status_ uint32
	echo                uint64 // 0: now
}

func (f forged) bytes() []byte {
	le := binary.LittleEndian
	b := []byte{f.version, f.kind}
	b = le.AppendUint32(le.AppendUint16(b, f.flags), f.seq)
	for _, v := range []uint64{f.conn, f.ticket, f.off, f.size} {
		b = le.AppendUint64(b, v)
	}
	for _, v := range []uint32{f.key, f.count, f.status_, 0} {
		b = le.AppendUint32(b, v)
	}
	now := clock()
	if f.echo == 0 {
		f.echo = now
	}
	for _, v := range []uint64{now, f.echo} {
		b = le.AppendUint64(b, v)
	}
	return b
}

// table spells rows of offsets and lengths.
func table(rows ...uint64) []byte {
	var b []byte
	for _, v := range rows {
		b = binary.LittleEndian.AppendUint64(b, v)
	}
	return b
}

// forger is a process that sends what it is told.
type forger struct {
	t       testing.TB
	in      io.Writer
	out     *bufio.Scanner
	address []byte
	got     [][]byte // heads
	late    int      // messages whose data begins with 0xee
}

func startForger(t testing.TB) *forger {
	t.Helper()
	exe := filepath.Join(t.TempDir(), "forger")
	standin.Compile(t, "-std=gnu11", "-Wall", "-Wextra", "-Werror", "-I.", "-o", exe,
		"testdata/forger.c", "load.c", "-ldl")
	cmd := exec.Command(exe)
	cmd.Env = append(os.Environ(), "UCX_TLS="+overTCP.Transports,
		"UCX_NET_DEVICES="+overTCP.Devices)
	for _, s := range overTCP.Settings {
		cmd.Env = append(cmd.Env, "UCX_"+s)
	}
	cmd.Stderr = os.Stderr
	in, err := cmd.StdinPipe()
	require.NoError(t, err)
	out, err := cmd.StdoutPipe()
	require.NoError(t, err)
	require.NoError(t, cmd.Start())
	t.Cleanup(func() { _ = in.Close(); _ = cmd.Wait() })
	f := &forger{t: t, in: in, out: bufio.NewScanner(out)}
	f.out.Buffer(nil, 1<<20)
	f.read()
	return f
}

// read takes what the process says until it is done.
func (f *forger) read() {
	f.t.Helper()
	for f.out.Scan() {
		word, rest, _ := strings.Cut(f.out.Text(), " ")
		switch word {
		case "done":
			return
		case "address":
			f.address, _ = hex.DecodeString(rest)
		case "got":
			head, data, _ := strings.Cut(rest, " ")
			if strings.HasSuffix(data, " 238") {
				f.late++
			}
			b, _ := hex.DecodeString(head)
			f.got = append(f.got, b)
		}
	}
	f.t.Fatal("the forger has died")
}

func (f *forger) tell(format string, args ...any) {
	f.t.Helper()
	_, _ = fmt.Fprintf(f.in, format+"\n", args...)
	f.read()
}

func (f *forger) raw(how byte, head, data []byte) {
	f.t.Helper()
	f.tell("send %c %x %s", how, head, hexOrNone(data))
}

func hexOrNone(data []byte) string {
	if len(data) == 0 {
		return "#0"
	}
	return hex.EncodeToString(data)
}

func (f *forger) send(h forged, data []byte) {
	f.t.Helper()
	h.version = messageVersion
	f.raw('e', h.bytes(), data)
}

// announce sends n bytes by rendezvous.
func (f *forger) announce(h forged, n int) {
	f.t.Helper()
	h.version = messageVersion
	f.tell("send r %x #%s", h.bytes(), strconv.Itoa(n))
}

// await returns the next message of a kind, or fails.
func (f *forger) await(kind byte) forged {
	f.t.Helper()
	for end := time.Now().Add(testLimit); time.Now().Before(end); f.tell("poll 5") {
		for i, b := range f.got {
			if len(b) == headBytes && b[1] == kind {
				f.got = f.got[i+1:]
				le := binary.LittleEndian
				return forged{kind: kind, flags: le.Uint16(b[2:]), seq: le.Uint32(b[4:]),
					off:  le.Uint64(b[24:]),
					size: le.Uint64(b[32:]), key: le.Uint32(b[40:]), count: le.Uint32(b[44:]),
					status_: le.Uint32(b[48:])}
			}
		}
	}
	f.t.Fatalf("no message of kind %d", kind)
	return forged{}
}

// victim is a context whose peer forges: memory of two keys with gaps around them.
type victim struct {
	*Context
	conn *Conn
	mem  []byte
	f    *forger
}

const (
	victimFrom, victimTo = 16 << 10, 32 << 10 // key 7
	frozenFrom, frozenTo = 40 << 10, 48 << 10 // key 8, read-only
	victimTicket         = 0x1122334455667788
)

func openVictim(t testing.TB) *victim {
	t.Helper()
	wake, err := proc.NewEvent()
	require.NoError(t, err)
	t.Cleanup(func() { _ = wake.Close() })
	buf, err := hostmem.Alloc(64<<10, hostmem.Options{Purpose: "test"})
	require.NoError(t, err)
	t.Cleanup(func() { _ = buf.Close() })
	v := &victim{Context: openContext(t, overTCP, wake), mem: buf.Bytes(), f: startForger(t)}
	fill(v.mem, 1)
	for key, m := range map[uint32]Memory{
		7: {Mem: v.mem[victimFrom:victimTo], Ticket: victimTicket},
		8: {Mem: v.mem[frozenFrom:frozenTo], Ticket: victimTicket, ReadOnly: true},
	} {
		require.NoError(t, v.Map(key, m))
	}
	t.Cleanup(func() {
		if v.conn != nil {
			_ = v.conn.Close(testGrace / 4)
		}
		if err := v.Close(); err != nil {
			t.Errorf("close: %v", err)
		}
	})
	v.meet(t)
	t.Cleanup(func() { v.f.tell("poll 5") })
	return v
}

// meet makes a connection to the forger and one back: UCX matches the two.
func (v *victim) meet(t testing.TB) {
	t.Helper()
	v.f.tell("connect %x", v.Address(0))
	conn, err := v.Connect(0, v.f.address)
	require.NoError(t, err)
	conn.Bind(0x4242, uint64(testGrace))
	v.conn = conn
}

// alive sees that messages on the connection are answered, or makes a new one.
func (v *victim) alive(t testing.TB) {
	t.Helper()
	for range 5 {
		if v.answers() {
			return
		}
		_ = v.conn.Close(testGrace / 4)
		v.meet(t)
	}
	t.Fatal("no connection is answered any more")
}

// answers reports whether messages on the connection are answered, and not that it has ended.
func (v *victim) answers() bool {
	v.f.got = nil
	v.f.send(forged{kind: msgConfirm, conn: v.conn.ID()}, nil)
	for end := time.Now().Add(testLimit); time.Now().Before(end); v.f.tell("poll 2") {
		for _, b := range v.f.got {
			if b[1] == msgConfirmed {
				return true
			}
		}
		slot, err := v.conn.Import(Import{Key: 1, Size: 1, Ticket: 1})
		if err != nil {
			return false
		}
		v.conn.Drop(slot)
	}
	return false
}
