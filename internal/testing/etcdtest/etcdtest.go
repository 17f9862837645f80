// SPDX-License-Identifier: Apache-2.0

// Package etcdtest runs the members of a real etcd for a test.
package etcdtest

import (
	"bytes"
	"fmt"
	"math/rand/v2"
	"net"
	"net/url"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"testing"

	"github.com/sluicehq/sluice/driver"
	"github.com/sluicehq/sluice/driver/drivertest"
)

// Member is a member of an etcd.
type Member struct {
	URL string // for clients

	t      *testing.T
	on     func(func() error) error // runs a function on the member's host
	folder string
	args   []string
	cmd    *exec.Cmd
	output bytes.Buffer
}

// Start starts so many members, which listen on the loopback alone and end with the test. It does
// not wait until they answer. It skips the test where the machine has no etcd.
func Start(t *testing.T, n int) []*Member {
	t.Helper()
	return start(t, n, ownLoopback(), here, "http")
}

// StartOn is Start at an address of a host, on which the function on runs others.
func StartOn(t *testing.T, n int, address string, on func(func() error) error) []*Member {
	t.Helper()
	return start(t, n, address, on, "http")
}

// StartSecure starts one member of https that asks clients for a certificate. files returns those
// of the member, whose certificate must be for the host, and of the authority.
func StartSecure(t *testing.T, files func(host string) (cert, key, authority string)) *Member {
	t.Helper()
	return start(t, 1, ownLoopback(), here, "https", func(m *Member) {
		u, err := url.Parse(m.URL)
		if err != nil {
			t.Fatal(err)
		}
		cert, key, authority := files(u.Hostname())
		m.args = append(m.args, "--cert-file", cert, "--key-file", key, "--trusted-ca-file",
			authority, "--client-cert-auth")
	})[0]
}

func here(f func() error) error { return f() }

// ownLoopback returns an address of the loopback that nobody else has, since others may take a port
// of 127.0.0.1 before the member does.
func ownLoopback() string {
	return fmt.Sprintf("127.%d.%d.%d", 1+rand.IntN(254), rand.IntN(256), 1+rand.IntN(254))
}

func start(t *testing.T, n int, address string, on func(func() error) error, scheme string,
	change ...func(*Member)) (members []*Member) {
	t.Helper()
	if _, err := exec.LookPath("etcd"); err != nil {
		drivertest.SkipIfUnavailable(t, &driver.UnavailableError{Backend: "etcd",
			Reason: err.Error(), Fix: "apt-get install etcd-server"})
	}
	var listeners []net.Listener
	free := func(scheme string) string {
		var l net.Listener
		err := on(func() (err error) {
			l, err = net.Listen("tcp", net.JoinHostPort(address, "0"))
			return err
		})
		if err != nil {
			t.Fatal(err)
		}
		listeners = append(listeners, l)
		return scheme + "://" + l.Addr().String()
	}
	var peers, all []string
	for k := range n {
		members = append(members, &Member{URL: free(scheme), t: t, on: on, folder: t.TempDir()})
		peers = append(peers, free("http"))
		all = append(all, fmt.Sprintf("m%d=%s", k, peers[k]))
	}
	for _, l := range listeners { // all together, so that no two get one port
		_ = l.Close()
	}
	for k, m := range members {
		m.args = []string{"--name", fmt.Sprint("m", k), "--data-dir",
			filepath.Join(m.folder, "data"), "--listen-peer-urls", peers[k],
			"--initial-advertise-peer-urls", peers[k], "--listen-client-urls", m.URL,
			"--advertise-client-urls", m.URL, "--initial-cluster", strings.Join(all, ","),
			"--initial-cluster-state", "new", "--unsafe-no-fsync"}
		for _, f := range change {
			f(m)
		}
		t.Cleanup(m.Kill)
		m.Start()
	}
	return members
}

// URLs lists where the members answer clients.
func URLs(members []*Member) (list []string) {
	for _, m := range members {
		list = append(list, m.URL)
	}
	return list
}

// Start starts a member that was killed.
func (m *Member) Start() {
	m.t.Helper()
	m.output.Reset()
	m.cmd = exec.Command("etcd", m.args...)
	m.cmd.Stdout, m.cmd.Stderr = &m.output, &m.output
	m.cmd.Env = append(os.Environ(), "GOMAXPROCS=1")
	m.cmd.SysProcAttr = &syscall.SysProcAttr{Pdeathsig: syscall.SIGKILL}
	if err := m.on(m.cmd.Start); err != nil {
		m.t.Fatal(err)
	}
}

// Kill ends a member by SIGKILL.
func (m *Member) Kill() {
	if m.cmd.ProcessState == nil {
		_ = m.cmd.Process.Kill()
		_ = m.cmd.Wait()
	}
	if m.t.Failed() {
		m.t.Logf("etcd at %s: %s", m.URL, m.output.Bytes())
	}
}

// Signal sends a member a signal.
func (m *Member) Signal(s os.Signal) {
	m.t.Helper()
	if err := m.cmd.Process.Signal(s); err != nil {
		m.t.Fatal(err)
	}
}

// Forget has a member that was killed start without what it knew.
func (m *Member) Forget() {
	m.t.Helper()
	if err := os.RemoveAll(filepath.Join(m.folder, "data")); err != nil {
		m.t.Fatal(err)
	}
}
