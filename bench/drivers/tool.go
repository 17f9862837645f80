// SPDX-License-Identifier: Apache-2.0

package drivers

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"time"

	"github.com/sluicehq/sluice/internal/figures"
)

// tool is a benchmark of others, as a server or as a client.
type tool struct {
	cmd   *exec.Cmd
	out   figures.Tail
	ended chan struct{} // closed when it is gone
	err   error         // of its end
}

// perfLimit is for a run of a client and its server. Tests have less.
var perfLimit = time.Minute

// startTool runs a program in a process group of its own, all of which can be killed.
func startTool(ctx context.Context, env []string, path string, args []string) (*tool, error) {
	c := &tool{cmd: exec.CommandContext(ctx, path, args...), ended: make(chan struct{})}
	c.cmd.Env = append(c.cmd.Environ(), env...)
	c.cmd.Stdout, c.cmd.Stderr = &c.out, &c.out
	c.cmd.SysProcAttr = &syscall.SysProcAttr{Pdeathsig: syscall.SIGKILL, Setpgid: true}
	c.cmd.Cancel = c.kill
	c.cmd.WaitDelay = time.Second // for a grandchild that holds the output
	if err := c.cmd.Start(); err != nil {
		return nil, fmt.Errorf("start %s: %w", filepath.Base(path), err)
	}
	go func() {
		c.err = c.cmd.Wait()
		if ctx.Err() != nil {
			c.err = context.Cause(ctx)
		}
		close(c.ended)
	}()
	return c, nil
}

func (c *tool) kill() error {
	err := syscall.Kill(-c.cmd.Process.Pid, syscall.SIGKILL)
	if errors.Is(err, syscall.ESRCH) {
		return nil
	}
	return err
}

// stop leaves nothing behind. The group is the process's own as long as that was not waited for.
func (c *tool) stop() {
	select {
	case <-c.ended:
	default:
		_ = c.kill()
		<-c.ended
	}
}

// last waits for the end of a client. When its server ends first, the client does soon, or never.
func (c *tool) last(server *tool) error {
	select {
	case <-c.ended:
	case <-server.ended:
		select {
		case <-c.ended:
		case <-time.After(perfLimit):
			return fmt.Errorf("the server ended early: %s", complaint(server.out.Bytes()))
		}
	}
	if c.err != nil {
		return fmt.Errorf("%w: %s", c.err, complaint(c.out.Bytes()))
	}
	return nil
}

// serveTool starts a server on a port that is free now, and returns when it listens. It listens on
// all addresses until its client has come.
func serveTool(ctx context.Context, env []string, path string, args []string) (*tool, int, error) {
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		return nil, 0, fmt.Errorf("find a free port: %w", err)
	}
	number := l.Addr().(*net.TCPAddr).Port
	l.Close()
	server, err := startTool(ctx, env, path, append([]string{"-p", fmt.Sprint(number)}, args...))
	if err != nil {
		return nil, 0, err
	}
	tick := time.NewTicker(2 * time.Millisecond)
	defer tick.Stop()
	for !listens(server.cmd.Process.Pid, number) {
		select {
		case <-server.ended:
			return nil, 0, fmt.Errorf("%s: the server ended early: %w: %s", filepath.Base(path),
				server.err, complaint(server.out.Bytes()))
		case <-tick.C:
		}
	}
	return server, number, nil
}

// listens reports whether a program listens on a TCP port of the network namespace of the process:
// to try and connect would be taken for the client.
func listens(pid, port int) bool {
	for _, table := range []string{"tcp", "tcp6"} {
		b, err := os.ReadFile(fmt.Sprintf("/proc/%d/net/%s", pid, table))
		if err != nil {
			continue
		}
		want := fmt.Appendf(nil, ":%04X", port)
		for line := range bytes.Lines(b) {
			// sl local_address rem_address st ...; 0A is LISTEN
			f := bytes.Fields(line)
			if len(f) > 3 && bytes.HasSuffix(f[1], want) && string(f[3]) == "0A" {
				return true
			}
		}
	}
	return false
}

// complaint is the line that says why a program failed: the last error of UCX, or else the last
// line with words.
func complaint(out []byte) string {
	last, failed := "", false
	for line := range strings.Lines(string(out)) {
		text := strings.TrimSpace(line)
		_, after, isError := strings.Cut(text, "ERROR ")
		switch {
		case isError:
			last, failed = after, true
		case !failed && strings.Trim(text, "-* ") != "":
			last = text
		}
	}
	return last[:min(len(last), 200)]
}
