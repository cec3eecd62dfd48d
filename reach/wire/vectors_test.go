package wire

import (
	"bytes"
	"encoding/hex"
	"encoding/json"
	"errors"
	"io"
	"os"
	"path/filepath"
	"slices"
	"testing"

	"go.uber.org/goleak"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

// The vectors are part of the protocol documents: other implementations run
// them too.
const vectorDir = "../../docs/protocol/vectors"

type vectors struct {
	Texts []struct{ Name, Flow, Text, Error, Writes string }

	Frames []struct {
		Name, Hex, Error string
		StreamID         ID `json:"stream_id"`
		Flags            Flags
		Payload          string
	}
	Streams []struct{ Name, Hex, Error, Rest string }
}

func loadVectors(tb testing.TB, name string, atLeast int) vectors {
	tb.Helper()
	b, err := os.ReadFile(filepath.Join(vectorDir, name))
	if err != nil {
		tb.Fatal(err)
	}
	var v vectors
	if err := json.Unmarshal(b, &v); err != nil {
		tb.Fatal(err)
	}
	if len(v.Texts) < atLeast || len(v.Frames)+len(v.Streams) < 10 {
		tb.Fatalf("%s has %d texts and %d others: vectors were lost", name, len(v.Texts), len(v.Frames)+len(v.Streams))
	}
	return v
}

var flowNames = map[string]Flow{
	"first_frame": FirstFrame, "host_to_broker": HostToBroker,
	"broker_to_host": BrokerToHost, "broker_to_client": BrokerToClient,
}

// kindOf names an error as the vectors do.
func kindOf(err error) string {
	_, unknownType := errors.AsType[*UnknownTypeError](err)
	switch {
	case err == nil:
		return ""
	case unknownType:
		return "type"
	case errors.Is(err, ErrVersion):
		return "version"
	case errors.Is(err, ErrFlags):
		return "flags"
	case errors.Is(err, ErrFrameSize):
		return "size"
	case errors.Is(err, ErrMalformed):
		return "malformed"
	case errors.Is(err, io.EOF):
		return "eof"
	case errors.Is(err, io.ErrUnexpectedEOF):
		return "cut"
	}
	return "other: " + err.Error()
}

func TestVectorsV1(t *testing.T) {
	v := loadVectors(t, "v1.json", 140)
	for _, tt := range v.Texts {
		t.Run(tt.Name, func(t *testing.T) {
			flow, known := flowNames[tt.Flow]
			if !known {
				t.Fatalf("flow %q", tt.Flow)
			}
			m, err := ParseV1(flow, []byte(tt.Text))
			if got := kindOf(err); got != tt.Error {
				t.Fatalf("ParseV1 = %v, want %q", err, tt.Error)
			}
			if err != nil {
				return
			}
			want := tt.Text
			if tt.Writes != "" {
				want = tt.Writes
			}
			if got, err := AppendV1(nil, m); err != nil || string(got) != want {
				t.Errorf("AppendV1 = %s, %v\nwant %s", got, err, want)
			}
		})
	}
	for _, tt := range v.Frames {
		t.Run("frame "+tt.Name, func(t *testing.T) {
			in := unhex(t, tt.Hex)
			id, flags, payload, err := ParseFrame(in)
			if got := kindOf(err); got != tt.Error {
				t.Fatalf("ParseFrame = %v, want %q", err, tt.Error)
			}
			if err != nil {
				return
			}
			if id != tt.StreamID || flags != tt.Flags || hex.EncodeToString(payload) != tt.Payload {
				t.Errorf("ParseFrame = %v %v %x", id, flags, payload)
			}
			if out := AppendFrame(nil, id, flags, payload); !bytes.Equal(out, in) {
				t.Errorf("AppendFrame = %x, want %x", out, in)
			}
		})
	}
}

func TestVectorsV2(t *testing.T) {
	v := loadVectors(t, "v2.json", 280)
	for _, tt := range v.Texts {
		t.Run(tt.Name, func(t *testing.T) {
			m, err := ParseMessage([]byte(tt.Text))
			if got := kindOf(err); got != tt.Error {
				t.Fatalf("ParseMessage = %v, want %q", err, tt.Error)
			}
			if err != nil {
				return
			}
			want := tt.Text
			if tt.Writes != "" {
				want = tt.Writes
			}
			if got, err := AppendMessage(nil, m); err != nil || string(got) != want {
				t.Errorf("AppendMessage = %s, %v\nwant %s", got, err, want)
			}
		})
	}
	for _, tt := range v.Streams {
		t.Run("stream "+tt.Name, func(t *testing.T) {
			r := bytes.NewReader(unhex(t, tt.Hex))
			_, err := ReadMessage(r)
			if got := kindOf(err); got != tt.Error {
				t.Fatalf("ReadMessage = %v, want %q", err, tt.Error)
			}
			if rest, _ := io.ReadAll(r); err == nil && hex.EncodeToString(rest) != tt.Rest {
				t.Errorf("left unread: %x, want %s", rest, tt.Rest)
			}
		})
	}
}

func unhex(tb testing.TB, s string) []byte {
	tb.Helper()
	b, err := hex.DecodeString(s)
	if err != nil {
		tb.Fatal(err)
	}
	return b
}

// TestVectorsAreWhole fails when a type is added without a vector.
func TestVectorsAreWhole(t *testing.T) {
	want1, want2 := []string{}, []string{}
	for _, types := range newMessage1 {
		for name := range types {
			want1 = append(want1, name)
		}
	}
	for name := range newMessage {
		want2 = append(want2, name)
	}
	for name, want := range map[string][]string{"v1.json": want1, "v2.json": want2} {
		var have []string
		for _, tt := range loadVectors(t, name, 1).Texts {
			var m struct{ Type string }
			if tt.Error == "" && json.Unmarshal([]byte(tt.Text), &m) == nil {
				have = append(have, m.Type)
			}
		}
		for _, kind := range want {
			if !slices.Contains(have, kind) {
				t.Errorf("%s has no good %s", name, kind)
			}
		}
	}
}
