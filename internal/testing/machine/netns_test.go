// SPDX-License-Identifier: Apache-2.0

package machine

import (
	"bufio"
	"fmt"
	"net"
	"net/netip"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/sluicehq/sluice/driver/drivertest"
)

func link(kind string) string {
	s, _ := os.Readlink("/proc/self/ns/" + kind)
	return s
}

// dial connects from one host to the other and sends a word.
func dial(p *Pair) error {
	var l net.Listener
	err := p.Far.Do(func() (err error) {
		l, err = net.Listen("tcp", p.Far.Addr.String()+":0")
		return err
	})
	if err != nil {
		return err
	}
	defer l.Close()
	got := make(chan string, 1)
	go func() {
		defer close(got)
		if c, err := l.Accept(); err == nil {
			_ = c.SetDeadline(time.Now().Add(5 * time.Second))
			word, _ := bufio.NewReader(c).ReadString('\n')
			c.Close()
			got <- word
		}
	}()
	var c net.Conn
	err = p.Near.Do(func() (err error) {
		c, err = (&net.Dialer{Timeout: 500 * time.Millisecond, FallbackDelay: -1}).Dial("tcp",
			l.Addr().String())
		return err
	})
	if err != nil {
		return err
	}
	defer c.Close()
	if _, err := c.Write([]byte("hello\n")); err != nil {
		return err
	}
	if word := <-got; word != "hello\n" {
		return fmt.Errorf("received %q", word)
	}
	return nil
}

// reaches tries until it works: neighbours may have to be found first, and on a busy machine
// one try may not be enough.
func reaches(t *testing.T, p *Pair) {
	t.Helper()
	var err error
	for start := time.Now(); time.Since(start) < 10*time.Second; time.Sleep(10 * time.Millisecond) {
		if err = dial(p); err == nil {
			return
		}
	}
	t.Fatalf("the cable is in, and %v", err)
}

// TestBetweenHosts: the other run finds the cable and the far host, and nothing of this one's.
func TestBetweenHosts(t *testing.T) {
	ran := filepath.Join(t.TempDir(), "ran")
	far, err := BetweenHosts(t, func(*Pair) error { return os.Setenv("SLUICE_NETNS_RAN", ran) })
	if err != nil {
		drivertest.SkipIfUnavailable(t, err)
	}
	if far == nil {
		if where, err := os.ReadFile(ran); err != nil || string(where) == link("net") {
			t.Errorf("the other run was in %q, %v", where, err)
		}
		return
	}
	p := &Pair{Near: &Host{}, Far: far}
	p.Near.net, err = threadNamespace()
	require.NoError(t, err)
	p.Far.Addr = netip.MustParseAddr(farIP)
	reaches(t, p)
	require.NoError(t, os.WriteFile(os.Getenv("SLUICE_NETNS_RAN"), []byte(link("net")), 0o600))
}

// TestBetweenHostsFails with the other run, and tells what that said.
func TestBetweenHostsFails(t *testing.T) {
	r := &recorder{TB: t}
	far, err := BetweenHosts(r)
	if err != nil {
		drivertest.SkipIfUnavailable(t, err)
	}
	if far != nil {
		t.Fatal("the other run is meant to fail")
	}
	if text := r.text.String(); !strings.Contains(text, "exit status 1") ||
		!strings.Contains(text, "meant to fail") {
		t.Errorf("the test was told %q", text)
	}
}

// recorder is a test that does not fail.
type recorder struct {
	testing.TB
	text strings.Builder
}

func (r *recorder) Errorf(format string, args ...any) { fmt.Fprintf(&r.text, format+"\n", args...) }
func (r *recorder) Log(args ...any)                   { fmt.Fprintln(&r.text, args...) }
