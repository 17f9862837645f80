// SPDX-License-Identifier: Apache-2.0

package verbs

import (
	"fmt"
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/sluicehq/sluice/driver"
	"github.com/sluicehq/sluice/driver/drivertest"
	"github.com/sluicehq/sluice/internal/testing/standin"
)

// skipWithoutVerbsHeaders skips where libibverbs-dev is missing.
func skipWithoutVerbsHeaders(t *testing.T) {
	t.Helper()
	if !standin.HasHeader("infiniband/verbs.h") {
		drivertest.SkipIfUnavailable(t, &driver.UnavailableError{
			Backend: "rdma", Reason: "no headers to compare with",
			Fix: "apt-get install libibverbs-dev"})
	}
}

// declarations lists all that a header declares, as testdata/facts.c compares it: the values of
// constants, the sizes of types, and where each field lies.
func declarations(header string) string {
	var list strings.Builder
	add := func(format string, args ...any) { fmt.Fprintf(&list, format+"\n", args...) }
	text := regexp.MustCompile(`(?s)/\*.*?\*/`).ReplaceAllString(header, "")
	for _, name := range regexp.MustCompile(`\bIBV_[A-Z0-9_]+`).FindAllString(text, -1) {
		add("VALUE(%s)", name)
	}
	for _, m := range regexp.MustCompile(`(?m)^(enum \w+) \{`).FindAllStringSubmatch(text, -1) {
		add("SIZE(%s)", m[1])
	}
	for _, m := range regexp.MustCompile(`(?sm)^((?:struct|union) \w+) \{\n(.*?)^\}`).
		FindAllStringSubmatch(text, -1) {
		add("SIZE(%s)", m[1])
		for _, field := range fieldsOf(m[2]) {
			add("FIELD(%s, %s)", m[1], field)
		}
	}
	return list.String()
}

var (
	callback = regexp.MustCompile(`\(\*(\w+)\)\(`)
	member   = regexp.MustCompile(`(\w+)(?:\[[^\]]*\])?\s*$`)
)

// fieldsOf lists the fields of a body, those of a type within it behind its name.
func fieldsOf(body string) (names []string) {
	for {
		at := strings.IndexAny(body, ";{")
		if at < 0 {
			return names
		}
		if body[at] == ';' {
			m := callback.FindStringSubmatch(body[:at])
			if m == nil {
				m = member.FindStringSubmatch(body[:at])
			}
			names, body = append(names, m[1]), body[at+1:]
			continue
		}
		end := at + 1
		for depth := 1; depth > 0; end++ {
			depth += strings.Count(body[end:end+1], "{") - strings.Count(body[end:end+1], "}")
		}
		inner := fieldsOf(body[at+1 : end-1])
		name, rest, _ := strings.Cut(body[end:], ";")
		if name, body = strings.TrimSpace(name), rest; name != "" {
			names = append(names, name)
			for i := range inner {
				inner[i] = name + "." + inner[i]
			}
		}
		names = append(names, inner...)
	}
}

func TestDeclarationsAreThoseOfVerbs(t *testing.T) {
	skipWithoutVerbsHeaders(t)
	var list string
	for _, name := range []string{"abi.h", "abi_device.h"} {
		text, err := os.ReadFile(name)
		require.NoError(t, err)
		list += declarations(string(text))
	}
	for _, one := range []string{"VALUE(IBV_WR_SEND)", "SIZE(union ibv_gid)",
		"FIELD(struct ibv_send_wr, wr.rdma.rkey)", "FIELD(struct ibv_context_ops, post_send)",
		"FIELD(struct ibv_async_event, element.port_num)"} {
		require.Contains(t, list, one)
	}
	file := filepath.Join(t.TempDir(), "declared.h")
	require.NoError(t, os.WriteFile(file, []byte(list), 0o600))
	declared := fmt.Sprintf("-DDECLARED=%q", file)
	ours := standin.Facts(t, "testdata/facts.c", "-std=c11", "-Werror", declared)
	theirs := standin.Facts(t, "testdata/facts.c", "-std=gnu11", "-DREAL", declared)
	require.Greater(t, len(ours), 300)
	require.Equal(t, theirs, ours)
}
