// SPDX-License-Identifier: Apache-2.0

package ucx

import (
	"bufio"
	"context"
	"encoding/hex"
	"fmt"
	"os"
	"os/exec"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/sluicehq/sluice/driver"
	"github.com/sluicehq/sluice/internal/testing/freeze"
)

// writerVariable makes the test binary a writer over these transports: for each line
// of its input, "address token", it connects and writes until that fails, and says how.
// With a third word it writes and says how often it could, see countAll.
const writerVariable = "SLUICE_UCX_TEST_WRITER"

// writerBytes is what it writes to.
const writerBytes = 4 << 20

// shortGrace makes the tests of silence quick.
const shortGrace = 600 * time.Millisecond

func serveWriter(list string) int {
	b, err := New(Config{Transports: list, Grace: shortGrace})
	if err != nil {
		fmt.Println("error", err)
		return 1
	}
	defer b.Close()
	seg, owner, err := b.Alloc(writerBytes)
	if err != nil {
		seg = driver.Segment{Kind: driver.DRAM, Len: writerBytes, Mem: make([]byte, writerBytes)}
	} else {
		defer owner.Close()
	}
	for i := range seg.Mem {
		seg.Mem[i] = byte(i) | 1
	}
	m, err := b.Register(seg)
	if err != nil {
		fmt.Println("error", err)
		return 1
	}
	for lines := bufio.NewScanner(os.Stdin); lines.Scan(); {
		words := strings.Fields(lines.Text())
		write := func(p driver.Peer, from, to uint32) error { return writeAll(b, p, from, to) }
		if len(words) > 2 {
			write = func(p driver.Peer, from, to uint32) error {
				return countAll(b, p, seg.Mem, from, to)
			}
		}
		fmt.Println(strings.ReplaceAll(writeTo(b, m, words[0], words[1], write).Error(), "\n", " "))
	}
	return 0
}

var nextTag uint64

// writeTo does it over a new connection.
func writeTo(b *Backend, m driver.Memory, addr, token string, write func(p driver.Peer, from,
	to uint32) error) error {
	to, err := hex.DecodeString(addr)
	if err != nil {
		return err
	}
	tok, err := hex.DecodeString(token)
	if err != nil {
		return err
	}
	ctx, cancel := context.WithTimeout(context.Background(), patience)
	defer cancel()
	p, err := b.Connect(ctx, to)
	if err != nil {
		return err
	}
	defer p.Close()
	key, _, err := p.Import(tok)
	if err != nil {
		return err
	}
	begin := time.Now()
	return fmt.Errorf("%w after %v", write(p, m.Key(), key), time.Since(begin))
}

// writeAll keeps the way to the memory full.
func writeAll(b *Backend, p driver.Peer, from, to uint32) error {
	var done [16]driver.Completion
	first := nextTag // those before ended when their peer was closed
	for tag, flying := first, 0; ; tag++ {
		nextTag = tag + 1
		d := []driver.Desc{{Len: writerBytes, LocalKey: from, RemoteKey: to}}
		if err := p.Submit(tag, &driver.Batch{Op: driver.Write, Descs: d}); err != nil {
			return fmt.Errorf("submit %d: %w", tag, err)
		}
		for flying++; flying > 3; {
			n, err := b.Poll(done[:])
			if err != nil {
				return err
			}
			for _, c := range done[:n] {
				if c.Tag < first {
					continue
				}
				if flying--; c.Err != nil {
					return fmt.Errorf("batch %d: %w", c.Tag, c.Err)
				}
			}
		}
	}
}

// writer is such a process.
type writer struct {
	t     *testing.T
	cmd   *exec.Cmd
	in    *os.File
	lines chan string
}

func startWriter(t *testing.T, list string) *writer {
	t.Helper()
	r, w, err := os.Pipe()
	require.NoError(t, err)
	c := exec.Command("/proc/self/exe")
	c.Env = append(os.Environ(), writerVariable+"="+list, "GORACE="+os.Getenv("GORACE")+
		" atexit_sleep_ms=0")
	c.Stdin, c.Stderr = r, os.Stderr
	out, err := c.StdoutPipe()
	require.NoError(t, err)
	require.NoError(t, c.Start())
	_ = r.Close()
	p := &writer{t: t, cmd: c, in: w, lines: make(chan string, 4)}
	ended := make(chan struct{})
	go func() {
		defer close(ended)
		for lines := bufio.NewScanner(out); lines.Scan(); {
			p.lines <- lines.Text()
		}
		_ = c.Wait()
	}()
	t.Cleanup(func() {
		_ = w.Close()
		select {
		case <-ended:
		case <-time.After(patience):
			t.Error("the writer does not end with its input")
			_ = c.Process.Kill()
			<-ended
		}
	})
	return p
}

// write has it write to memory of ours; how is "" or "count".
func (p *writer) write(b *Backend, m driver.Memory, how string) {
	p.t.Helper()
	token, err := m.AppendToken(nil)
	require.NoError(p.t, err)
	if _, err := fmt.Fprintf(p.in, "%x %x %s\n", b.Addr(), token, how); err != nil {
		p.t.Fatal(err)
	}
}

// outcome is what ended the writing.
func (p *writer) outcome() string {
	p.t.Helper()
	select {
	case line := <-p.lines:
		return line
	case <-time.After(patience):
		p.t.Fatal("the writer does not end")
		return ""
	}
}

// freeze stops every thread of it.
func (p *writer) freeze() {
	p.t.Helper()
	require.NoError(p.t, freeze.Process(p.cmd.Process))
}

func (p *writer) thaw() {
	p.t.Helper()
	require.NoError(p.t, freeze.Thaw(p.cmd.Process))
}
