// SPDX-License-Identifier: Apache-2.0

package main

import (
	"context"
	"fmt"
	"hash/fnv"
	"math/rand/v2"
	"os"
	"path/filepath"
	"strconv"
	"syscall"
	"time"
)

// disturbance returns what -stall and -quota do to the process of a test, nil if neither was given.
// The meter, if there is one, is told of each stop: it is evidence as any other standstill is.
func (o *options) disturbance(p *testPackage, m *meter) func(context.Context, *os.Process) {
	if o.stall == 0 && o.quota == 0 {
		return nil
	}
	return func(ctx context.Context, process *os.Process) {
		if o.quota > 0 {
			release, err := hold(process.Pid, o.quota)
			if err != nil {
				fmt.Fprintf(os.Stderr, "gotest: -quota: %v: give -stall alone\n", err)
			}
			defer release()
		}
		if o.stall == 0 {
			<-ctx.Done()
			return
		}
		name := fnv.New64a()
		name.Write([]byte(p.path))
		random := rand.New(rand.NewPCG(o.stall, name.Sum64()))
		between := func(from, to time.Duration) <-chan time.Time {
			return time.After(from + time.Duration(random.Int64N(int64(to-from))))
		}
		stops, sum := 0, time.Duration(0)
		for {
			select {
			case <-ctx.Done():
				fmt.Fprintf(o.out, "stall\t%s\t%d stops, %.0f s\n", p.path, stops, sum.Seconds())
				return
			case <-between(300*time.Millisecond, 1500*time.Millisecond):
			}
			began := time.Now()
			_ = process.Signal(syscall.SIGSTOP) // not to a later process of that number
			select {
			case <-ctx.Done():
			case <-between(300*time.Millisecond, 3*time.Second):
			}
			_ = process.Signal(syscall.SIGCONT)
			stops, sum = stops+1, sum+time.Since(began)
			if m != nil {
				m.add(began, time.Since(began))
			}
		}
	}
}

// hold puts a process, and all that it starts from then on, into a control group that may use a
// share of one core, in periods of a second: it stands still for the rest of each.
func hold(pid int, share float64) (release func(), err error) {
	const period = 1_000_000 // microseconds
	quota := strconv.Itoa(int(share * period))
	name := "sluice-gotest-" + strconv.Itoa(pid)
	group, limits := filepath.Join("/sys/fs/cgroup", name), map[string]string{
		"cpu.max": quota + " " + strconv.Itoa(period)}
	if _, err := os.Stat("/sys/fs/cgroup/cpu"); err == nil { // version 1
		group, limits = filepath.Join("/sys/fs/cgroup/cpu", name), map[string]string{
			"cpu.cfs_period_us": strconv.Itoa(period), "cpu.cfs_quota_us": quota}
	}
	release = func() {
		for range 100 { // the group is busy until its last process was waited for
			if os.Remove(group) == nil {
				return
			}
			time.Sleep(10 * time.Millisecond)
		}
	}
	if err := os.Mkdir(group, 0o755); err != nil {
		return func() {}, err
	}
	limits["cgroup.procs"] = strconv.Itoa(pid)
	for _, file := range []string{"cpu.cfs_period_us", "cpu.cfs_quota_us", "cpu.max",
		"cgroup.procs"} {
		if text, ok := limits[file]; ok {
			if err := os.WriteFile(filepath.Join(group, file), []byte(text), 0); err != nil {
				return release, err
			}
		}
	}
	return release, nil
}
