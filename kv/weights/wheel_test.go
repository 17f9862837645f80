// SPDX-License-Identifier: Apache-2.0

package weights

import (
	"bufio"
	"encoding/binary"
	"encoding/json"
	"fmt"
	"maps"
	"math/rand/v2"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/sluicehq/sluice/driver"
	"github.com/sluicehq/sluice/driver/drivertest"
)

// wheelPython finds an interpreter with safetensors: hack/stacks makes one.
func wheelPython() (string, error) {
	for _, path := range []string{os.Getenv("SAFETENSORS_PYTHON"),
		"../../build/stacks/bin/python"} {
		if path == "" {
			continue
		}
		if exec.Command(path, "-c", "import safetensors").Run() == nil {
			return path, nil
		}
	}
	return "", &driver.UnavailableError{Backend: "safetensors", Reason: "no Python has its wheel",
		Fix: "hack/stacks, or name one by SAFETENSORS_PYTHON"}
}

// read is what a reader says of a file.
type read struct {
	Tensors  map[string][2]json.RawMessage `json:"tensors"`
	Metadata map[string]string             `json:"metadata"`
	Error    string                        `json:"error"`
}

// lookalikes are forms that safetensors reads as its JSON library happens to take them, and that no
// writer makes: we refuse them. And the other way round: names with half of a surrogate pair, which
// it refuses and we read.
var lookalikes = []string{
	`{"a":["F32",[1],[0,4]]}`,
	`{"a":{"dtype":{"F32":null},"shape":[1],"data_offsets":[0,4]}}`,
	"{" + entry("a", "F32", strings.Repeat("1,", 64)+"1", "0,4") + "}",
	"{" + entry(`\ud800`, "F32", "1", "0,4") + "}",
}

// sameAs are headers that a reader may take for good or for bad.
var sameAs = []string{
	`{"__metadata__":null,` + entry("a", "F32", "1", "0,4") + "}",
	" \n\t{" + entry("a", "F32", "1", "0,4") + "}",
	`{"a":{"dtype":"F32","shape":[1],"data_offsets":[0,4],"x":{"y":[1,{}],"z":null}}}`,
	"{" + entry("a", "F32", "1", "0,4") + "," + entry("a", "F32", "1", "0,4") + "}",
	"{" + entry("a", "I8", "9", "0,9") + "," + entry("a", "F32", "1", "0,4") + "}",
	"{" + entry("a", "F32", "1", "0,4") + "," + entry("a", "F32", "1", "4,8") + "}",
	`{"__metadata__":{"a":"1","a":"2"},` + entry("a", "F32", "1", "0,4") + "}",
	`{"__metadata__":{},"__metadata__":{},` + entry("a", "F32", "1", "0,4") + "}",
	`{"__metadata__":null,"__metadata__":{},` + entry("a", "F32", "1", "0,4") + "}",
	`{"__metadata__":{"a":null},` + entry("a", "F32", "1", "0,4") + "}",
	`{"__metadata__":[],` + entry("a", "F32", "1", "0,4") + "}",
	`{"a":{"dtype":"F32","shape":null,"data_offsets":[0,4]}}`,
	`{"a":{"dtype":"F32","shape":[],"data_offsets":[0,4],"shape":[]}}`,
	`{"a":null,` + entry("b", "F32", "1", "0,4") + "}",
	`{"a":{},` + entry("b", "F32", "1", "0,4") + "}",
	"{" + entry("a", "F32", "1.0", "0,4") + "}", "{" + entry("a", "F32", "1e0", "0,4") + "}",
	"{" + entry("a", "F32", "-0", "0,0") + "," + entry("b", "F32", "", "0,4") + "}",
	"{" + entry("a", "F32", "01", "0,4") + "}", "{" + entry("a", "F32", "1", "0,4,") + "}",
	"{" + entry("a", "F32", "1", "0,4") + ",}", "{" + entry("a", "f32", "1", "0,4") + "}",
	"{" + entry("", "F32", "1", "0,4") + "}", "{" + entry(`\u0000`, "F32", "1", "0,4") + "}",
	"{" + entry("\x01", "F32", "1", "0,4") + "}", "\ufeff{" + entry("a", "F32", "1", "0,4") + "}",
	"{" + entry("a", "F32", "1", "0,4") + "}\x00", "{" + entry("a", "F32", "1", "0,4") + "} ",
	"{" + entry("a", "F32", "0,18446744073709551615", "0,0") + "," + entry("b", "F32", "",
		"0,4") + "}",
	"{" + entry("a", "F32", "18446744073709551615,0", "0,0") + "," + entry("b", "F32", "",
		"0,4") + "}",
	"{" + entry("a", "F32", "18446744073709551616,0", "0,0") + "," + entry("b", "F32", "",
		"0,4") + "}",
	"{" + entry("a", "F32", "4294967296,4294967296,0", "0,0") + "," + entry("b", "F32", "",
		"0,4") + "}",
	"{" + entry("a", "F32", "0", "4,4") + "," + entry("b", "F32", "", "0,4") + "}",
	"{" + entry("a", "F32", "0", "2,2") + "," + entry("b", "F32", "", "0,4") + "}",
	`{"a":{"dtype":"F32","shape":[1],"data_offsets":[0,4],"x":` + strings.Repeat("[", 100) +
		strings.Repeat("]", 100) + "}}",
	`{"a":{"dtype":"F32","shape":[1],"data_offsets":[0,4],"x":` + strings.Repeat("[", 200) +
		strings.Repeat("]", 200) + "}}",
	`{"a":{"dtype":"F32","shape":[1],"data_offsets":[0,4],"x":1e999}}`,
	`{"a":{"dtype":"F32","shape":[1],"data_offsets":[0,4],"x":tru}}`,
	`{"a":{"dtype":"F32","shape":[1],"data_offsets":[0,4],"x":1,"x":2}}`,
}

// headers are those above, those of other tests, and a thousand that came of good ones by a few
// changes.
func headers() map[string]int {
	all := map[string]int{} // the bytes of data behind each
	for _, text := range sameAs {
		all[text] = 4
	}
	for _, c := range spoilt {
		all[c.header] = c.data
	}
	for dtype := range bits {
		n := bits[dtype] // bytes of eight elements
		all["{"+entry("a", string(dtype), "8", fmt.Sprint("0,", n))+"}"] = int(n)
	}
	delete(all, "{"+entry("a", "U8", strings.Repeat("1,", 64)+"1", "0,1")+"}") // see lookalikes
	words := []string{"{", "}", "[", "]", ",", ":", "null", "0", "1", "4", "-1", "1.5", `"a"`,
		`"dtype"`, `"shape"`, `"data_offsets"`, `"F32"`, `"__metadata__"`, " ", "\n", `"x":[{}]`,
		"true", `""`, `\`, `"`, "é", "\xff"}
	good := `{"__metadata__":{"format":"pt"},` + entry("a", "F32", "1", "0,4") + "," +
		entry("b", "I64", "2,0", "4,4") + "," + entry("c", "U8", "3", "4,7") + "}"
	rng := rand.New(rand.NewPCG(1, 2))
	for range 1000 {
		text := good
		for range 1 + rng.IntN(3) {
			at := rng.IntN(len(text) + 1)
			cut := min(rng.IntN(4), len(text)-at)
			word := words[rng.IntN(len(words))]
			if rng.IntN(3) == 0 {
				word = ""
			}
			text = text[:at] + word + text[at+cut:]
		}
		all[text] = 7
	}
	return all
}

func (h *header) said() (s read) {
	s = read{Tensors: map[string][2]json.RawMessage{}, Metadata: h.Metadata}
	for _, t := range h.Tensors {
		dtype, _ := json.Marshal(t.Type)
		shape, _ := json.Marshal(t.Shape)
		s.Tensors[t.Name] = [2]json.RawMessage{dtype, shape}
	}
	return s
}

// TestAsSafetensorsReads compares with the wheel of safetensors, header by header: what it reads we
// read, with the same names, types, shapes and metadata, and what it refuses we refuse.
func TestAsSafetensorsReads(t *testing.T) {
	python, err := wheelPython()
	if err != nil {
		drivertest.SkipIfUnavailable(t, err)
	}
	all := headers()
	for _, text := range lookalikes {
		all[text] = 4
	}
	list := slices.Sorted(maps.Keys(all))
	dir := t.TempDir()
	var names strings.Builder
	for i, text := range list {
		b := binary.LittleEndian.AppendUint64(nil, uint64(len(text)))
		b = append(append(b, text...), make([]byte, all[text])...)
		path := filepath.Join(dir, fmt.Sprint(i))
		require.NoError(t, os.WriteFile(path, b, 0o600))
		fmt.Fprintln(&names, path)
	}
	cmd := exec.Command(python, "testdata/oracle.py")
	cmd.Stdin, cmd.Stderr = strings.NewReader(names.String()), os.Stderr
	out, err := cmd.Output()
	require.NoError(t, err)
	lines := bufio.NewScanner(strings.NewReader(string(out)))
	lines.Buffer(nil, 1<<20)
	good := 0
	for _, text := range list {
		require.True(t, lines.Scan())
		var theirs read
		require.NoError(t, json.Unmarshal(lines.Bytes(), &theirs))
		h, err := readHeader(file(text, all[text]))
		if slices.Contains(lookalikes, text) {
			if (err == nil) == (theirs.Error == "") {
				t.Errorf("%.300q: %v, and they %q: it is no difference any more", text, err,
					theirs.Error)
			}
			continue
		}
		switch ours := h.said(); {
		case (err == nil) != (theirs.Error == ""):
			t.Errorf("%.300q: ours %v, theirs %q", text, err, theirs.Error)
		case err != nil:
		case !sameRead(ours, theirs):
			t.Errorf("%.300q: ours %s, theirs %s", text, ours.Tensors, theirs.Tensors)
		default:
			good++
		}
	}
	if good < 50 {
		t.Errorf("%d headers are good: too few to compare", good)
	}
}

func sameRead(a, b read) bool {
	return maps.Equal(a.Metadata, b.Metadata) && maps.EqualFunc(a.Tensors, b.Tensors,
		func(a, b [2]json.RawMessage) bool {
			return string(a[0]) == string(b[0]) && string(a[1]) == strings.ReplaceAll(string(b[1]),
				" ", "")
		})
}
