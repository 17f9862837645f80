// SPDX-License-Identifier: Apache-2.0

package machine

import (
	"bufio"
	"errors"
	"fmt"
	"io/fs"
	"net"
	"net/netip"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"golang.org/x/sys/unix"

	"github.com/sluicehq/sluice/driver"
	"github.com/sluicehq/sluice/driver/drivertest"
	"github.com/sluicehq/sluice/internal/testing/testkit"
)

// roleVariable makes the test binary another process of these tests.
const roleVariable = "SLUICE_NETNS_TEST"

func TestMain(m *testing.M) {
	switch os.Getenv(roleVariable) {
	case "":
		os.Exit(m.Run())
	case "where":
		where()
	case "maker":
		makeAndWait()
	case "inherited":
		inherited()
	}
}

// where prints what the process finds around it.
func where() {
	list, err := net.Interfaces()
	if err != nil {
		fmt.Println(err)
	}
	var names []string
	for _, i := range list {
		names = append(names, i.Name)
	}
	slices.Sort(names)
	if seen, err := os.ReadDir("/sys/class/net"); err != nil || len(seen) != len(names) {
		fmt.Printf("/sys shows %v, %v\n", seen, err)
	}
	fmt.Println(link("net"), link("ipc"), link("uts"), strings.Join(names, ","))
}

// makeAndWait makes a pair and waits to be killed.
func makeAndWait() {
	p, err := NewPair()
	if err != nil {
		fmt.Println(err)
		return
	}
	fmt.Println(inode(p.Near), inode(p.Far))
	time.Sleep(time.Hour)
}

// inherited uses a host that its parent has made.
func inherited() {
	h := HostFromFile(os.NewFile(3, "host"))
	c := exec.Command(os.Args[0])
	c.Env = append(os.Environ(), roleVariable+"=where")
	c.Stdout = os.Stdout
	if err := errors.Join(h.Start(c), c.Wait()); err != nil {
		fmt.Println(err)
	}
}

func link(kind string) string {
	s, _ := os.Readlink("/proc/self/ns/" + kind)
	return s
}

// inode names a host as /proc does.
func inode(h *Host) string {
	s, _ := os.Readlink(fmt.Sprintf("/proc/self/fd/%d", h.net.Fd()))
	return s
}

func pair(t *testing.T) *Pair {
	t.Helper()
	testkit.CheckLeaks(t)
	home, around := link("net"), surroundings(t)
	p, err := NewPair()
	if err != nil {
		drivertest.SkipIfUnavailable(t, err)
	}
	t.Cleanup(func() {
		if err := p.Close(); err != nil {
			t.Error(err)
		}
		if got := surroundings(t); got != around {
			t.Errorf("the machine has %s, before the test it had %s", got, around)
		}
		threads, _ := filepath.Glob("/proc/self/task/*/ns/net")
		for _, p := range threads {
			if s, err := os.Readlink(p); err == nil && s != home {
				t.Errorf("a thread is in %s, not in %s", s, home)
			}
		}
	})
	return p
}

// surroundings are what the tests must leave alone.
func surroundings(t *testing.T) string {
	t.Helper()
	list, err := net.Interfaces()
	require.NoError(t, err)
	named, err := os.ReadDir("/run/netns")
	if err != nil && !errors.Is(err, fs.ErrNotExist) {
		t.Fatal(err)
	}
	return fmt.Sprint(list, named)
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

func TestTimedPairReachesEachOther(t *testing.T) {
	p := pair(t)
	reaches(t, p)
	require.NoError(t, p.Far.Plug(false))
	if err := dial(p); err == nil {
		t.Error("connected without a cable")
	}
	require.NoError(t, p.Far.Plug(true))
	reaches(t, p)
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
	p.Near.net, err = ofThread()
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

func output(t *testing.T, start func(*exec.Cmd) error, role string, files ...*os.File) []string {
	t.Helper()
	c := exec.Command(os.Args[0])
	c.Env = append(os.Environ(), roleVariable+"="+role)
	c.ExtraFiles = files
	var out strings.Builder
	c.Stdout, c.Stderr = &out, &out
	if err := errors.Join(start(c), c.Wait()); err != nil {
		t.Fatalf("%v: %s", err, out.String())
	}
	return strings.Fields(out.String())
}

func TestStartInAHost(t *testing.T) {
	p := pair(t)
	got := output(t, p.Far.Start, "where")
	if len(got) != 4 || got[0] != inode(p.Far) || got[1] == link("ipc") || got[2] == link("uts") ||
		got[3] != device+",lo" {
		t.Errorf("the process is in %q, want %s and namespaces other than %s, %s", got,
			inode(p.Far), link("ipc"), link("uts"))
	}
	if got := output(t, p.Near.Start, "inherited", p.Far.File()); len(got) != 4 ||
		got[0] != inode(p.Far) {
		t.Errorf("a child of a process in the near host is in %q, want %s", got, inode(p.Far))
	}
	if got := output(t, (*exec.Cmd).Start, "where"); len(got) != 4 || got[0] != link("net") {
		t.Errorf("a process that was started plainly is in %q", got)
	}
}

// TestDoOfWhatEndsItsGoroutine: a failed require does so, of which the caller must hear.
func TestDoOfWhatEndsItsGoroutine(t *testing.T) {
	testkit.CheckLeaks(t)
	h, err := NewHost()
	if err != nil {
		drivertest.SkipIfUnavailable(t, err)
	}
	defer h.Close()
	require.ErrorIs(t, h.Do(func() error {
		runtime.Goexit()
		return nil
	}), errEnded)
	require.NoError(t, h.Do(func() error { return nil }))
}

// TestTimedHostsEndWithTheirProcess: with SIGKILL there is no cleanup.
func TestTimedHostsEndWithTheirProcess(t *testing.T) {
	pair(t) // skips where there are no namespaces
	c := exec.Command(os.Args[0])
	c.Env = append(os.Environ(), roleVariable+"=maker")
	out, err := c.StdoutPipe()
	require.NoError(t, err)
	require.NoError(t, c.Start())
	line, err := bufio.NewReader(out).ReadString('\n')
	names := strings.Fields(line)
	if err != nil || len(names) != 2 || !strings.HasPrefix(names[0], "net:[") {
		t.Fatalf("%q, %v", line, err)
	}
	if held(names) == "" {
		t.Error("the hosts are not held while their process lives")
	}
	require.NoError(t, c.Process.Kill())
	_ = c.Wait() // killed
	if where := held(names); where != "" {
		t.Errorf("a namespace outlives its process: %s", where)
	}
}

// held finds who has one of these namespaces.
func held(names []string) string {
	for _, pattern := range []string{"/proc/[0-9]*/fd/*", "/proc/[0-9]*/task/*/ns/net"} {
		paths, _ := filepath.Glob(pattern)
		for _, p := range paths {
			if s, err := os.Readlink(p); err == nil && slices.Contains(names, s) {
				return p
			}
		}
	}
	return ""
}

func TestWhatIsMissingIsSaid(t *testing.T) {
	found := func(string) (string, error) { return "/sbin/ip", nil }
	for want, err := range map[string]error{
		"run the test as root": missing(1000, found),
		"apt-get install iproute2": missing(0, func(string) (string, error) {
			return "", exec.ErrNotFound
		}),
		"run outside of the container, or give it CAP_SYS_ADMIN": refused(unix.EPERM),
	} {
		var u *driver.UnavailableError
		if !errors.As(err, &u) || u.Fix != want {
			t.Errorf("%v, want the advice %q", err, want)
		}
	}
	if err := missing(0, found); err != nil {
		t.Error(err)
	}
	if err := refused(nil); err != nil {
		t.Error(err)
	}
	if err := refused(unix.ENOMEM); errors.Is(err, driver.ErrUnavailable) {
		t.Errorf("%v is no reason to skip a test", err)
	}
}
